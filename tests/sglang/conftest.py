"""Tests of a platform on a real SGLang: collected by `make test-sglang` alone."""

from __future__ import annotations

from tests.fakes import real_sglang

collect_ignore_glob = [] if real_sglang.is_installed() else ["test_*.py"]
