"""All that a trainer keeps of its users beside the states of its models."""

from pathlib import Path

from ...storage.tinker_checkpoints import CheckpointFolders
from .calls import SnapshotCalls, StoreCalls
from .exports import Exports
from .sessions import TinkerSessions, TrainingRuns
from .store import MAX_BYTES, InflightWeights, KeptCheckpoints


class KeptByTrainer:
    """Checkpoints, runs and sessions below one folder, and the calls about them."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        """Keep them below `folder`, of each user's checkpoints at most `max_bytes`."""
        folders = CheckpointFolders(folder)
        self.checkpoints = KeptCheckpoints(folders, max_bytes=max_bytes)
        self.runs = TrainingRuns(folder, self.checkpoints)
        self.sessions = TinkerSessions(folder, self.runs)
        self.inflight = InflightWeights(folders)
        self.snapshots = SnapshotCalls(folder)
        exports = Exports(folder, folders)
        self.calls = StoreCalls(folders, self.checkpoints, self.runs, self.sessions, exports)

    def load(self) -> None:
        """Read what is there; raises ModelError for a checkpoint that is damaged."""
        self.checkpoints.load()
        self.runs.load()
        self.sessions.load()
