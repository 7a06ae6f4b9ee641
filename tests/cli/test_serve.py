"""`outlast serve`: options and settings are the same thing."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from outlast import cli
from outlast.cli import serve
from outlast.core.paths import default_log_dir
from outlast.serve.settings import ENGINES, Settings


def parse(*words: str) -> Settings:
    parser = argparse.ArgumentParser()
    serve.configure(parser)
    return serve.settings(parser.parse_args(words))


def test_no_option_gives_the_default_settings() -> None:
    assert parse() == Settings()


def test_every_setting_has_an_option() -> None:
    names = {field.name for field in dataclasses.fields(Settings)}
    assert names - {"assembly"} == {*serve._OPTIONS, "engine_options"}  # `assembly` is chosen by --engine


def test_an_engine_is_chosen_by_name() -> None:
    assert parse("--engine", "transformers").assembly == ENGINES["transformers"]
    assert parse("--engine", "native") == Settings()
    with pytest.raises(SystemExit):
        parse("--engine", "abacus")


def test_the_transformers_engine_asks_for_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from outlast.cli import extras

    monkeypatch.setattr(extras, "_installed", dict)
    monkeypatch.setattr(extras, "_present", lambda name: name != "transformers")
    assert cli.main(["serve", "--engine", "transformers"]) == 3
    assert "Run: pip install 'outlast[hf]'" in capsys.readouterr().err


def test_options_reach_the_settings_with_their_types() -> None:
    found = parse(
        "--model", "m.gguf", "--port", "0", "--durability", "host", "--log-dir", "logs", "--spares", "2",
        "--hang-timeout", "0.5", "--allow-degrade", "--no-checkpoint", "--engine-option", "a=b=c",
    )  # fmt: skip
    assert found == Settings(
        model="m.gguf",
        port=0,
        durability="host",
        log_dir="logs",
        spares=2,
        hang_timeout=0.5,
        allow_degrade=True,
        checkpoint=False,
        engine_options=(("a", "b=c"),),
    )


def test_settings_that_make_no_sense_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--spares", "-1"]) == 2
    assert "spares" in capsys.readouterr().err


def test_durable_log_goes_where_outlast_log_looks_for_it() -> None:
    assert parse("--durability", "host").log_dir == str(default_log_dir())
    assert parse("--durability", "host", "--log-dir", "mine").log_dir == "mine"
    assert parse().log_dir is None


def test_missing_extra_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from outlast.cli import extras

    monkeypatch.setattr(extras, "_present", lambda name: name != "uvicorn")
    assert cli.main(["serve"]) == 3
    assert "missing: uvicorn. Run: pip install 'outlast[serve]'" in capsys.readouterr().err
