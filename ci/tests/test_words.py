"""What the checker of our English finds, and where."""

from pathlib import Path

import pytest

from ci.words import PHRASES, findings, main

PHRASE = {"goes on from": "resumes from"}


@pytest.mark.parametrize(
    "text",
    [
        "It goes on from there.",
        "Goes on\nfrom the snapshot.",
        "    # It goes\n    # on from the snapshot.\n",
        'print("it goes on "\n      f"from {path}")',
    ],
)
def test_a_phrase_is_found_wherever_its_line_ends(text: str) -> None:
    ((line, _, instead),) = findings(text, PHRASE)
    assert (line, instead) == (1, "resumes from")


def test_the_line_of_each_phrase_in_order() -> None:
    text = "all is well\nfor ever, and in vain\nfor ever"
    phrases = {"in vain": "without success", "for ever": "forever"}
    assert [(line, words) for line, words, _ in findings(text, phrases)] == [
        (2, "for ever"),
        (2, "in vain"),
        (3, "for ever"),
    ]


@pytest.mark.parametrize("text", ["It foregoes on from", "goes on fromage", "goes, on from"])
def test_parts_of_words_are_not_found(text: str) -> None:
    assert not list(findings(text, PHRASE))


def test_there_is_no_is_english() -> None:
    assert not list(findings("There is no rank 4. It is no longer there."))
    assert list(findings("That is no snapshot."))


def test_every_phrase_is_an_expression_that_text_can_match() -> None:
    assert not list(findings("A short text.")) and len(PHRASES) > 40


def test_a_finding_fails_and_names_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.md").write_text("One.\nIt waits for ever.\n")
    assert main([str(tmp_path / "page.md")]) == 1
    assert f"{tmp_path / 'page.md'}:2: 'for ever': write forever" in capsys.readouterr().out
    (tmp_path / "page.md").write_text("It waits forever.\n")
    assert main([str(tmp_path / "page.md")]) == 0
