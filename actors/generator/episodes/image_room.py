"""Room for images in a rendered text: as many tokens as each of them takes."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ....schemas.wire.errors import DataError, ModelError

if TYPE_CHECKING:
    from ...models.vision import ImageReader


def check_seen(images: Sequence[bytes], reader: "ImageReader | None") -> None:
    """Raise ModelError for images that a model without a `reader` does not see."""
    if images and reader is None:
        raise ModelError(
            "a prompt holds images, and the model reads text alone",
            hint="use a vision-language model of the Qwen2-VL or Qwen2.5-VL class, or leave the "
            "images out",
        )


def with_room(
    text: str,
    images: Sequence[bytes],
    reader: "ImageReader | None",
    token_text: Callable[[int], str],
) -> str:
    """Write the token of each image as often as the image takes tokens.

    Without a `reader` the model reads text alone. Raises ModelError for images that it does not
    see, DataError for what is no image, and for a text that says an image's token in words.
    """
    check_seen(images, reader)
    if reader is None:
        return text
    token = token_text(reader.token_id)
    between = text.split(token)
    if len(between) != len(images) + 1:
        raise DataError(
            f"a prompt with {len(images)} images has {len(between) - 1} times {token} once "
            "the chat template has rendered it",
            hint=f"no message may hold the text {token}, and the template must write it once "
            "for each image",
        )
    rooms = [token * reader.count_tokens(image) for image in images]
    return "".join(part for pair in zip(between, [*rooms, ""], strict=True) for part in pair)
