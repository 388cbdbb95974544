"""Reading the pages of the service as tests do: their texts, tables, links, and what they load."""

from collections import Counter
from html.parser import HTMLParser
from urllib.parse import urljoin

import httpx
import pytest
from gemm_tuner_service.answering import tally_keeper

_LOADING = {"src", "href", "xlink:href", "action", "poster", "data", "srcset"}


def count_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pages wait for counts that are made for them."""
    monkeypatch.setattr(tally_keeper, "KEPT_S", 0.0)
    monkeypatch.setattr(tally_keeper, "LONGEST_S", 0.0)
    monkeypatch.setattr(tally_keeper, "PATIENCE_S", 60.0)


class Page(HTMLParser):
    """A page: its elements, links, rows of tables, and all text."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__()
        self.answer = answer
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.feed(answer.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "tr":
            self.rows.append([])
        if tag == "br" and self.rows and self.rows[-1]:
            self.rows[-1][-1] += " "
        if tag in {"td", "th"} and self.rows:
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if (
            self.lasttag in {"td", "th", "a", "span", "progress", "br"}
            and self.rows
            and self.rows[-1]
        ):
            self.rows[-1][-1] += data.strip("\n")

    @property
    def text(self) -> str:
        """Return all words of the page, without gaps."""
        return " ".join(" ".join(self.texts).split())

    @property
    def links(self) -> list[str]:
        """Return where links go."""
        return [value for tag, name, value in self.attributes if (tag, name) == ("a", "href")]

    @property
    def loaded(self) -> list[tuple[str, str]]:
        """Return what elements but links load or send to."""
        return [(tag, value) for tag, name, value in self.attributes if name in _LOADING]


def follow_all(client: httpx.Client, start: str, most: int = 200) -> dict[str, Page]:
    """Return every page of the service that links lead to from one, by its address."""
    found: dict[str, Page] = {}
    waiting = [start]
    while waiting:
        place = waiting.pop()
        if place in found:
            continue
        assert len(found) < most, "the pages do not end"
        answer = client.get(place, follow_redirects=True)
        found[place] = page = Page(answer)
        if not answer.headers["Content-Type"].startswith("text/html"):
            continue
        for link in page.links:
            target = urljoin(place, link).partition("#")[0]
            assert target.startswith("/"), f"{place} has a link to {link}"
            waiting.append(target)
    return found


def read_page(client: httpx.Client, path: str, **asked: object) -> Page:
    """Return a page that must be there."""
    answer = client.get(path, **asked)  # type: ignore[arg-type]  # of a request
    assert answer.status_code == 200, answer.text
    return Page(answer)
