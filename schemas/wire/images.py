"""Images in chat messages, as ordered parts of a message's content.

A part is `{"type": "image", "image": …}` (or `image_url`) with the bytes of an encoded file (PNG,
JPEG …), a map that holds them under `bytes`, or a data URL. In a group, where prompts are alike,
each image travels once: a part then has its index in the group's `images`. Images are not decoded
here.
"""

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from .errors import DataError

_KINDS = ("image", "image_url")
_MAGIC = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}


def image_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the image parts of messages."""
    for message in messages:
        content = message.get("content")
        for part in cast("list[Any]", content) if isinstance(content, list) else []:
            if _is_image(part):
                yield part


def images_of(
    messages: Sequence[Mapping[str, Any]], shared: Sequence[bytes] = ()
) -> tuple[bytes, ...]:
    """Return the encoded images of messages; DataError for one without bytes."""
    return tuple(encoded_image(part, shared) for part in image_parts(messages))


def shows_later(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether images follow the assistant's first answer."""
    roles = [message.get("role") for message in messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    return any(image_parts(messages[first:]))


def replace_images(
    messages: Sequence[Mapping[str, Any]], new: Callable[[dict[str, Any]], Any]
) -> list[dict[str, Any]]:
    """Return messages with `new(part)` as the image of each image part."""
    return [
        {**message, "content": [_replaced(part, new) for part in cast("list[Any]", content)]}
        if isinstance(content := message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def number_images(
    messages: Sequence[Mapping[str, Any]], numbers: dict[bytes, int], shared: Sequence[bytes] = ()
) -> list[dict[str, Any]]:
    """Return messages with image numbers; adds missing ones to `numbers`."""
    return replace_images(
        messages, lambda part: numbers.setdefault(encoded_image(part, shared), len(numbers))
    )


def restore_images(
    messages: Sequence[Mapping[str, Any]], shared: Sequence[bytes]
) -> list[dict[str, Any]]:
    """Return messages with bytes instead of image numbers."""
    return replace_images(
        messages, lambda part: encoded_image(part, shared) if _is_number(part) else _image(part)
    )


def with_data_urls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for OpenAI's API: each image as a data URL.

    Raises DataError for an image without bytes or of unknown type.
    """
    return [
        {**message, "content": [_as_url(part) for part in cast("list[Any]", content)]}
        if isinstance(content := message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def data_url(encoded: bytes) -> str:
    """Return the data URL of a PNG, JPEG, GIF or WebP file, recognised by its first bytes; else
    ""."""
    kind = next((kind for magic, kind in _MAGIC.items() if encoded.startswith(magic)), None)
    if kind is None or (kind == "image/webp" and encoded[8:12] != b"WEBP"):
        return ""
    return f"data:{kind};base64,{base64.b64encode(encoded).decode()}"


def plain_text(content: Any) -> str:
    """Return a message's content as text; each image is `[image]`."""
    if not isinstance(content, list):
        return str(content)
    parts = cast("list[Any]", content)
    return "".join("[image]" if _is_image(part) else _text(part) for part in parts)


def _text(part: Any) -> str:
    return str(cast("dict[str, Any]", part).get("text", part) if isinstance(part, dict) else part)


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and cast("dict[str, Any]", part).get("type") in _KINDS


def _is_number(part: Mapping[str, Any]) -> bool:
    return isinstance(_image(part), int)


def _image(part: Mapping[str, Any]) -> Any:
    return part.get("image", part.get("image_url"))


def _replaced(part: Any, new: Callable[[dict[str, Any]], Any]) -> Any:
    if not _is_image(part):
        return part
    rest = {key: value for key, value in part.items() if key not in _KINDS}
    return {**rest, "type": "image", "image": new(part)}


def _as_url(part: Any) -> Any:
    if not _is_image(part):
        return part
    encoded = encoded_image(part)
    if not (url := data_url(encoded)):
        raise DataError(
            f"an image of {len(encoded)} bytes is of no known kind",
            hint="store images as PNG, JPEG, GIF or WebP files",
        )
    return {"type": "image_url", "image_url": {"url": url}}


def encoded_image(part: Mapping[str, Any], shared: Sequence[bytes] = ()) -> bytes:
    """Return the bytes of one image part."""
    image = _image(part)
    if isinstance(image, int) and 0 <= image < len(shared):
        return shared[image]
    if isinstance(image, Mapping):
        fields = cast("Mapping[str, Any]", image)
        raw = fields.get("bytes")
        image = fields.get("url") if raw is None else raw
    if isinstance(image, bytes):
        return image
    if isinstance(image, bytearray | memoryview):
        return bytes(cast("bytearray", image))
    if isinstance(image, str) and image.startswith("data:") and ";base64," in image:
        try:
            text = "".join(image.partition(";base64,")[2].split())  # it may contain line breaks
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise DataError(f"the data URL of an image is damaged: {error}") from error
    where = repr(image) if isinstance(image, str | int) else type(image).__name__
    raise DataError(
        f"an image of a prompt is not there in bytes, but as {where[:200]}",
        hint="store images with their bytes in the column images; files and addresses are not "
        "opened",
    )
