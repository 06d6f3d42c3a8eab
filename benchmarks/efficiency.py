"""Parallel efficiency of the apps on two ranks."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import plots
from benchmarks.figures import Group, Measured, load
from benchmarks.harness import Contestant, Place, Settings, Team, running, slowest

#: Arguments to train only, for a long time, and the iterations of a turn.
APPS = {
    "mnist": (["--epoch", "100000"], 400),
    "imagenet": (["--epoch", "100000"], 12),
    "seq2seq": (["--epoch", "100000", "--patience", "100000"], 15),
}
ONE, TWO = "1 rank on 1 core", "ours, 2 ranks on 2 cores"
AT_THE_SAME_TIME = "2 single ranks at the same time"
#: The teams of each turn. Teams of one turn run at the same time.
TURNS = {
    TWO: ["two"],
    ONE: ["first"],
    AT_THE_SAME_TIME: ["first", "second"],
    "1 rank on 2 cores": ["whole"],
}


def measure(settings: Settings) -> Iterator[Group | str]:
    """Yield groups."""
    yield from (measure_app(app, settings) for app in APPS if settings.wants(app))


def measure_app(app: str, settings: Settings) -> Group:
    """Measure one app."""
    one, two = Place("1 rank", (1,)), Place("2 ranks", (2,))
    starts = {
        "two": lambda: Team(two, "app"),
        "first": lambda: Team(one, "app", core=0),
        "second": lambda: Team(one, "app", core=1),
        "whole": lambda: Team(one, "app"),
    }
    arguments, iterations = APPS[app]
    order = Contestant(app, "", {"app": app, "arguments": arguments})
    group = Group(f"apps/{app}, defaults", {"app": app}, [Measured(turn) for turn in TURNS], ONE)
    with running(starts) as teams:
        for name, team in teams.items():  # they start up and draw images
            settings.tell(f"{app}: start {name}")
            team.start(order, 2)
            team.finish()
        for round_ in range(settings.rounds + 1):
            for turn, names in TURNS.items():
                settings.tell(f"{app}: {turn}")
                for name in names:
                    teams[name].start(order, 3 if settings.quick else iterations)
                seconds = max(slowest(teams[name].finish()) for name in names)
                if round_ > 0:  # the first round warms up
                    group.row(turn).seconds.append(seconds)
    for row in group.rows:
        row.more["efficiency"] = group.ratio(ONE, row.name) or 0.0
    return group


def draw() -> None:
    """Draw the efficiency of each app with MPICH, and without any exchange."""
    panels: list[plots.Panel] = []
    for group in load("efficiency").get("mpich", {"groups": []})["groups"]:
        bars = []
        for label, row in (("2 ranks", TWO), ("no exchange", AT_THE_SAME_TIME)):
            percent = 100 * (group.ratio(ONE, row) or 0.0)
            outlined = 0.0 if row == TWO else percent
            text = f"{percent:.0f} %"
            bars.append(plots.Bar(label, percent, plots.OURS, text, outlined=outlined))
        panels += plots.panel(group.title.partition(",")[0], bars)
    plots.draw("efficiency", panels, "parallel efficiency on 2 cores; more is better")
