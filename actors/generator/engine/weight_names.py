"""Which tensors new weights must have: their names, shapes, sizes, and which of them are one."""

from collections.abc import Mapping

import torch

from ....schemas.wire.errors import EngineError
from ...models.weight_tensors import TensorSource, as_tensor, shape_of

_NAMES_SHOWN = 8


class WeightNames:
    """The tensors that change from version to version; a tied one has several names."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        """`weights` are the tensors themselves by name, on whatever device."""
        self.tensors: list[torch.Tensor] = []
        self.names: list[list[str]] = []
        """The names of each of `tensors`."""
        seen: dict[int, int] = {}
        for name, tensor in weights.items():
            index = seen.setdefault(id(tensor), len(self.tensors))
            if index == len(self.tensors):
                self.tensors.append(tensor)
                self.names.append([])
            self.names[index].append(name)

    def check(self, given: Mapping[str, TensorSource]) -> None:
        """Raise EngineError listing the names that are missing, unknown, or of the wrong shape."""
        known = {name for names in self.names for name in names}
        problems: list[str] = []
        missing = [names[0] for names in self.names if not any(n in given for n in names)]
        extra = sorted(name for name in given if name not in known)
        wrong: list[str] = []
        for live, names in zip(self.tensors, self.names, strict=True):
            for name in names:
                shape = shape_of(given[name]) if name in given else tuple(live.shape)
                if shape != tuple(live.shape):
                    wrong.append(f"{name} {list(shape)}, the model's is {list(live.shape)}")
        for what, names in (("missing", missing), ("unknown", extra), ("wrong shape", wrong)):
            if names:
                more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
                problems.append(f"{what}: {', '.join(names[:_NAMES_SHOWN])}{more}")
        if problems:
            raise EngineError(
                f"the new weights do not fit the model: {'; '.join(problems)}",
                hint="learner and generator must run the same model",
            )

    def once(self, given: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        """Return each tensor under one of its names.

        Raises EngineError for a dtype or size that cannot be, and where names of one tensor are
        given different ones.
        """
        once: dict[str, TensorSource] = {}
        for names in self.names:
            first, *others = [name for name in names if name in given]
            once[first] = given[first]
            for other in others:
                both = [as_tensor(given[name]).float() for name in (first, other)]
                if not torch.equal(*both):
                    raise EngineError(
                        f"{first} and {other} are one tensor in this model, the new weights give "
                        "two",
                        hint="learner and generator must both tie their embeddings",
                    )
        return once
