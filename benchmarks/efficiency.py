"""How much faster the apps train on two ranks than on one."""

from __future__ import annotations

from benchmarks.harness import Contestant, Measured, Place, Team, running
from benchmarks.report import Group
from benchmarks.settings import Settings

TITLE = "Parallel efficiency of the apps"
INTRODUCTION = """\
Each app as `mpiexec -n 2 train.py` starts it, with nothing set by the user, beside the same app on
one rank that may use one of the two cores (`taskset`): as many examples for each rank and as much
of the machine. Times are those of an iteration, with the reading of its batch; validation and
snapshots are not in it. All are kept alive and measured in turn. What two such single ranks lose
when both run at the same time, without an exchange, is the machine's share: memory and cache that
both need, and workers that read images beside the ranks. One rank that has both cores to itself is
there for those who want to know what a second rank gains them on the same machine."""

#: Arguments by which nothing but training happens, for long enough.
APPS = {
    "mnist": ["--epoch", "100000"],
    "imagenet": ["--epoch", "100000"],
    "seq2seq": ["--epoch", "100000", "--patience", "100000"],
}
ITERATIONS = {"mnist": 400, "imagenet": 12, "seq2seq": 15}
TWO, ONE = "ours, 2 ranks on 2 cores", "1 rank on 1 core"
BOTH, WHOLE = "2 single ranks at the same time", "1 rank on 2 cores"


def measure(settings: Settings) -> tuple[list[Group], list[str]]:
    """Measure; return groups, and what could not be measured and why."""
    return [measure_app(app, settings) for app in APPS if settings.wants(app)], []


def measure_app(app: str, settings: Settings) -> Group:
    """Measure one app."""
    one, two = Place("1 rank", (1,)), Place("2 ranks", (2,))
    tell = settings.teller(f"apps/{app}")
    starts = {
        "two": lambda: Team(two, "app"),
        "first": lambda: Team(one, "app", core=0),
        "second": lambda: Team(one, "app", core=1),
        "whole": lambda: Team(one, "app"),
    }
    # The teams of each turn; those of one turn run at the same time.
    turns = {TWO: ["two"], ONE: ["first"], BOTH: ["first", "second"], WHOLE: ["whole"]}
    order = Contestant(app, "", {"app": app, "arguments": APPS[app]})
    rows = {name: Measured(name) for name in turns}
    with running(starts) as teams:
        for name, team in teams.items():  # they prepare, and draw images
            tell(f"start {name}")
            team.start(order, 2)
            team.finish()
        iterations = 3 if settings.quick else ITERATIONS[app]
        for round_ in range(settings.rounds + 1):
            for row, running_now in turns.items():
                tell(row)
                for one_of_them in running_now:
                    teams[one_of_them].start(order, iterations)
                seconds = max(teams[name].finish().seconds for name in running_now)
                if round_ > 0 or settings.quick:  # the first one warms up
                    rows[row].seconds.append(seconds)
    group = Group(f"apps/{app}, defaults", {"app": app}, list(rows.values()), ONE)
    group.notes.append(describe(group))
    return group


def describe(group: Group) -> str:
    """Return the parallel efficiency of an app, in words."""
    efficiency, limit = (group.ratio(ONE, name) or 0.0 for name in (TWO, BOTH))
    return (
        f"Parallel efficiency {efficiency:.2f}; of two single ranks at the same time {limit:.2f}; "
        f"of what those do, two ranks with an exchange do {efficiency / limit:.0%}."
    )
