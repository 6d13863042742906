"""What a node asks for each process of a job that it starts: a key for that process alone."""

from ...broker.client.keys import JobIdentity, job_key
from ...broker.client.rpc import Service
from ...broker.jobs import JobStore, is_final
from ...schemas.user import JobKeyRequest, NewKey
from ...schemas.wire.errors import AuthError
from ...schemas.wire.subjects import rpc


class JobKeys:
    """Signs keys for actors that a live job has."""

    def __init__(self, jobs: JobStore, secret: bytes) -> None:
        """Sign with `secret`."""
        self._jobs = jobs
        self._secret = secret

    async def open(self, service: Service) -> None:
        """Answer nodes; nobody else may publish there."""
        await service.endpoint("job-key", rpc("node", "keys", "job"), JobKeyRequest, self._sign)

    async def _sign(self, request: JobKeyRequest) -> NewKey:
        record = await self._jobs.find_by_id(request.user, request.job)
        actors = record.actors if record is not None else []
        actor = next((one for one in actors if one.name == request.actor), None)
        if record is None or is_final(record) or record.attempt != request.attempt or not actor:
            raise AuthError(
                f"job {request.job} does not run {request.actor} in attempt {request.attempt}",
                hint="the job has ended or was resumed meanwhile",
            )
        identity = JobIdentity(
            request.user, request.job, actor.role, request.actor, request.attempt
        )
        return NewKey(secret=job_key(identity, self._secret))
