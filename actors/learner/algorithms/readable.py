"""Whether the model that learns can read a group, before the group may become part of a batch."""

from collections.abc import Sequence

from torch import nn

from ....schemas.rollout import Group, Trajectory
from ....schemas.wire.errors import DataError
from ....schemas.wire.images import images_of, shows_later
from ...models.vision import ImageReader
from .training_batch import components_of


def check_readable(
    group: Group, model: nn.Module, image_reader: ImageReader | None, components: Sequence[str]
) -> None:
    """Raise DataError for a group that the model cannot read.

    The reward's `components` must be told. Images must be in the prompts, but for a model that
    reads text alone, for which they are there for people to look at.
    """
    for rows in group.episodes:
        components_of(rows, components)
    if image_reader is None:
        return
    for item in group.sampled:
        _check_images(item, group, model, image_reader)


def _check_images(item: Trajectory, group: Group, model: nn.Module, reader: ImageReader) -> None:
    images = images_of(item.messages, group.images)
    prompt = item.token_ids[: int(item.mask.argmax())]
    if images:
        # Those of a tool's result stand behind the first answer, as some of a conversation do.
        is_later = item.kind or shows_later(item.messages)
        until = int(item.turn_ends[-1]) if is_later else len(prompt)
        seen = reader.see(model, item.token_ids[:until], images)
        if item.mask[seen.places_Q].any():
            raise DataError(
                "the policy generated an image's token before the last image",
                hint="image tokens may stand in what was given to the policy alone",
            )
    elif (prompt == reader.token_id).any():
        raise DataError(
            "a prompt holds image tokens, its messages no images",
            hint="the messages of a trajectory must hold what the policy saw",
        )
