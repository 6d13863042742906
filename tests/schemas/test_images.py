"""Images in messages: their forms, and how they travel to other people's endpoints."""

from typing import Any

import pytest
from tinkermq.schemas.wire.errors import DataError
from tinkermq.schemas.wire.images import image_parts, images_of, with_data_urls

PNG = b"\x89PNG\r\n\x1a\n and more"
WEBP = b"RIFF1234WEBP and more"


def _asked(image: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]
    return [{"role": "system", "content": "Look."}, {"role": "user", "content": parts}]


@pytest.mark.parametrize("encoded", [PNG, WEBP])
def test_an_image_goes_to_an_endpoint_as_a_data_url_and_comes_back_as_it_was(
    encoded: bytes,
) -> None:
    sent = with_data_urls(_asked({"bytes": encoded, "path": None}))
    assert sent[0] == {"role": "system", "content": "Look."}
    image, text = sent[1]["content"]
    assert text == {"type": "text", "text": "What?"}
    assert image["image_url"]["url"].startswith("data:image/")
    assert images_of(sent) == (encoded,)


@pytest.mark.parametrize(
    ("image", "words"),
    [(b"RIFF1234WAVE", "12 bytes is of no known kind"), ("a.png", r"as 'a\.png'")],
)
def test_what_is_no_image_is_not_sent(image: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        with_data_urls(_asked(image))


def test_messages_without_images_have_none() -> None:
    assert not any(image_parts([{"role": "user", "content": "<image>"}, {"role": "user"}]))
