"""A bar that shows how far long work has come."""

from chainermn.extensions.terminal_report import is_watched


class Progress:
    """A bar on a terminal; nothing elsewhere.

    Parameters
    ----------
    total : int
        Of whatever is counted.
    what : str
        Name of the work.
    """

    WIDTH = 40

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.shown = max(total, 1), what, -1
        self.watched = is_watched()

    def to(self, done: int) -> None:
        """Show that so much has been done."""
        percent = 100 * done // self.total
        if self.watched and percent != self.shown:
            bar = "#" * (percent * self.WIDTH // 100)
            end = "\n" if percent == 100 else ""
            print(f"\r{self.what} [{bar:.<{self.WIDTH}}] {percent} %", end=end, flush=True)
            self.shown = percent
