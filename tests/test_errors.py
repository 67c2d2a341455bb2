"""Each error has a code of its own, by which another process restores it."""

from __future__ import annotations

import pytest

from localspec import errors

CLASSES = [
    cls for cls in errors._subclasses(errors.LocalspecError) if cls.__module__ == errors.__name__
]


def test_no_two_errors_share_a_code() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_is_restored_from_its_code(cls: type[errors.LocalspecError]) -> None:
    error = errors.error_from_code(cls.code, "A sentence.", param="field")
    assert type(error) is cls
    assert (error.message, error.param, str(error)) == ("A sentence.", "field", "A sentence.")
    sized = errors.error_from_code(cls.code, "Too long.", n_prompt_tokens=9, n_ctx=8)
    assert (sized.n_prompt_tokens, sized.n_ctx) == (9, 8)


def test_an_unknown_code_becomes_the_base_class() -> None:
    assert type(errors.error_from_code("of_the_future", "Hm.")) is errors.LocalspecError
