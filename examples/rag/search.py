"""Search by BM25 over the entries of `entries.txt`: one a line, its title before the first colon."""

import math
import re
from collections import Counter, defaultdict
from pathlib import Path

ENTRIES = tuple((Path(__file__).parent / "entries.txt").read_text().splitlines())
SHOWN = 2
# The usual values; a word of the title counts as often as so many others.
SATURATION, LENGTH, TITLE = 1.5, 0.75, 3


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


class Index:
    """The weight of each word in each entry that has it."""

    def __init__(self, entries: tuple[str, ...] = ENTRIES) -> None:
        counts = [Counter(words(entry.partition(":")[0]) * (TITLE - 1) + words(entry)) for entry in entries]
        mean = sum(count.total() for count in counts) / len(counts)
        entries_with = Counter(word for count in counts for word in count)
        self.entries = entries
        self.weights: dict[str, dict[int, float]] = defaultdict(dict)
        for place, count in enumerate(counts):
            norm = SATURATION * (1 - LENGTH + LENGTH * count.total() / mean)
            for word, often in count.items():
                # The fewer entries have a word, the more it counts.
                rarity = math.log(1 + (len(entries) - entries_with[word] + 0.5) / (entries_with[word] + 0.5))
                self.weights[word][place] = rarity * often * (SATURATION + 1) / (often + norm)

    def search(self, query: str, shown: int = SHOWN) -> list[str]:
        """Return the entries that fit best, the best first; none that has no word of the query."""
        scores: Counter[int] = Counter()
        for word in sorted(set(words(query))):
            scores.update(self.weights.get(word, {}))
        best = sorted(scores, key=lambda place: (-scores[place], place))
        return [self.entries[place] for place in best[:shown]]
