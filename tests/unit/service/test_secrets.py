from pathlib import Path

import pytest
from pydantic import SecretStr

from leyden.libs.service.secrets import SecretError, read_secret


def file_of(tmp_path: Path, content: bytes = b"s3cret\n", mode: int = 0o600) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640])
def test_a_secret_is_the_one_line_of_its_file(tmp_path: Path, mode: int) -> None:
    assert read_secret(None, file_of(tmp_path, mode=mode)) == "s3cret"


def test_a_setting_counts_before_a_file_and_neither_is_none(tmp_path: Path) -> None:
    assert read_secret(SecretStr("given"), tmp_path / "absent") == "given"
    assert read_secret(None, None) is None


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o660, 0o666, 0o602, 0o777])
def test_a_file_that_others_can_read_or_change_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    with pytest.raises(SecretError, match=rf"mode {mode:04o}.*chmod 600") as refused:
        read_secret(None, file_of(tmp_path, mode=mode))
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe"])
def test_a_file_without_a_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(SecretError, match="secret"):
        read_secret(None, file_of(tmp_path, content))
    with pytest.raises(SecretError, match="absent"):
        read_secret(None, tmp_path / "absent")


def test_a_mounted_secret_is_a_link_and_its_own_mode_counts(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file_of(tmp_path, mode=0o440))
    assert read_secret(None, link) == "s3cret"
