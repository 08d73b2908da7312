"""The few names of popart."""

from __future__ import annotations

import logging
import re
from importlib import metadata

import jax
import pytest

import popart
import popxl


def test_the_version_names_the_runtime_and_jax():
    installed = metadata.version("popxl-xla")
    assert popart.versionString() == f"{installed}+jax{jax.__version__}"


def test_a_runtime_that_is_not_installed_has_a_version_too(monkeypatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert popart.versionString() == f"0+unknown.jax{jax.__version__}"
    local = popart.versionString().partition("+")[2]
    assert re.fullmatch(r"[a-z0-9]+(\.[a-z0-9]+)*", local), "a local version has these letters"


def test_loggers_are_those_of_popxl(caplog):
    assert popart.getLogger() is logging.getLogger("popxl")
    assert popart.getLogger("session").parent is popart.getLogger()
    popart.getLogger().setLevel("INFO")
    try:
        popxl.Session(popxl.Ir())
    finally:
        popart.getLogger().setLevel(logging.NOTSET)
    assert any(r.name == "popxl" and "compiled" in r.getMessage() for r in caplog.records)


def test_exceptions_are_the_ones_that_popxl_raises():
    assert popart.popart_exception is popxl.errors.popart_exception
    assert popart.poplar_application_runtime_error is popxl.errors.poplar_application_runtime_error
    with pytest.raises(popart.popart_exception):
        popxl.Session(popxl.Ir(), "tpu")


def test_data_types_have_the_names_of_popxls():
    for kind in popart.DataType:
        assert popxl.dtype.from_name(kind.value).name == kind.value
