"""``--name value`` is another spelling of ``name=value`` for every command, and changes no error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.cli import main
from moebench.commands.words import FLAGS, respell

NAMES = st.from_regex(r"[a-z][a-z_]{0,8}(\.[a-z]{1,5})?", fullmatch=True).filter(lambda name: name not in FLAGS)
VALUES = st.from_regex(r"[a-zA-Z0-9./,_]{1,9}", fullmatch=True)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=5), st.lists(st.sampled_from("abc"), min_size=5, max_size=5))
def test_three_spellings_are_one(pairs, ways):
    def spell(name: str, value: str, way: str) -> list[str]:
        dashed = "--" + name.replace("_", "-")
        return {"a": [f"{name}={value}"], "b": [f"{dashed}={value}"], "c": [dashed, value]}[way]

    words = [word for (name, value), way in zip(pairs, ways, strict=False) for word in spell(name, value, way)]
    assert respell(words) == [f"{name}={value}" for name, value in pairs]


@pytest.mark.parametrize(
    "words",
    [["--help"], ["-m"], ["--cfg", "job"], ["--multirun", "a=1"], ["list", "-v", "--verbose"], ["--alone"], ["--"]],
)
def test_flags_and_names_without_a_value_stay(words):
    assert respell(words) == words


def test_a_value_may_be_negative_and_hold_an_equals_sign():
    assert respell(["--seed", "-1", "--out=a=b", "--x", "y=1"]) == ["seed=-1", "out=a=b", "--x", "y=1"]


@pytest.mark.parametrize(("spelled", "plain"), [(["--qant", "int4"], ["qant=int4"]), (["--model"], ["--model"])])
def test_errors_are_those_of_the_plain_spelling(spelled, plain, capsys):
    errors = []
    for words in (spelled, plain):
        assert main(["pack", *words]) == 2
        errors.append(capsys.readouterr().err)
    assert errors[0] == errors[1]


def test_a_command_takes_the_other_spelling(tmp_path, capsys):
    out = tmp_path / "trace.safetensors"
    words = ["--out", str(out), "--layers", "2", "--experts=4", "--top-k", "1", "--prefill", "8"]
    code = main(["trace", "synth", *words])
    assert code == 0, capsys.readouterr().err
    assert out.is_file()
