"""Three retrievers with one interface, and a small invented world to search in.

`search_batch(queries, top_k)` returns the best documents of each query. `Retriever` ranks by BM25 in memory, fast for
short documents whose rare words say what they are about; `Documents` ranks a file of yours by BM25, exactly, with the
package bm25s; `HttpRetriever` asks a server that speaks the protocol of Search-R1. `World` is drawn from a seed: too
large for a tiny model to know by heart, so that it has to search. No other dependencies, importable alone.
"""

import heapq
import http.client
import json
import math
import random
import re
import time
import urllib.error
import urllib.request
from functools import lru_cache

RELATIONS = ("mother", "teacher", "rival", "neighbour", "doctor", "friend")
FIRST_NAMES = [a + b for a in "Al Be Cor Da El Fa Jo Mi".split() for b in "dra do nan vi ko lis men tta".split()]
LAST_NAMES = [a + b for a in "Bru Hol Kres Os Pel Tam Var Wes".split() for b in "by ton len ard ik way um er".split()]
MAX_QUERY_WORDS = 64
MAX_DOCUMENT_CHARS = 1000  # of a document that is shown


class Retriever:
    """BM25 over (title, text) documents; a word of the title counts as two more, so that a person's facts come first.

    To stay fast, only documents that share the rare words of the query are ranked: a further rare word narrows them as
    long as `top_k` are left. Equal scores keep the order of the documents.
    """

    def __init__(self, documents: list[tuple[str, str]], k1: float = 1.2, b: float = 0.75):
        self.texts, self.postings = [text for _, text in documents], {}  # word -> {document: its weight there}
        words = [2 * split(title) + split(text) for title, text in documents]
        mean = sum(map(len, words)) / max(len(words), 1)
        for document, found in enumerate(words):
            for word in set(found):
                count = found.count(word)
                weight = count * (k1 + 1) / (count + k1 * (1 - b + b * len(found) / mean))
                self.postings.setdefault(word, {})[document] = weight
        for weights in self.postings.values():
            rarity = math.log(1 + (len(words) - len(weights) + 0.5) / (len(weights) + 0.5))
            weights.update({document: weight * rarity for document, weight in weights.items()})

    def search(self, query: str, top_k: int = 3) -> list[str]:
        words = dict.fromkeys(split(query[: 32 * MAX_QUERY_WORDS])[:MAX_QUERY_WORDS])
        postings = sorted((self.postings[word] for word in words if word in self.postings), key=len)
        if not postings:
            return []
        candidates = postings[0].keys()
        for weights in postings[1:]:
            if len(weights) < len(self.texts) / 10 and len(narrowed := candidates & weights.keys()) >= top_k:
                candidates = narrowed
        score = {document: sum(weights.get(document, 0.0) for weights in postings) for document in candidates}
        best = heapq.nsmallest(top_k, candidates, key=lambda document: (-score[document], document))
        return [self.texts[document] for document in best]

    def search_batch(self, queries: list[str], top_k: int = 3) -> list[list[str]]:
        return [self.search(query, top_k) for query in queries]


class Documents:
    """BM25 over the rows of a data file, `title` and `text` (or `contents`, as in Search-R1): the exact best `top_k`.

    Words of a title count as words of the text do. Equal scores keep the order of the rows; a document without any word
    of the query is never found.
    """

    def __init__(self, path: str):
        from envs.data_files import read_rows

        try:
            import bm25s
        except ImportError as error:
            raise ValueError(f"--documents: {error}; pip install bm25s") from None
        self.texts, words = [], []
        for place, row in read_rows(path):
            contents = read_document(row, place)
            self.texts.append(one_line(contents)[:MAX_DOCUMENT_CHARS])
            words.append(split(contents))
        if not any(words):
            raise ValueError(f"{path}: found no words, expected rows with title and text")
        self.index = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
        self.index.index(words, show_progress=False)

    def search(self, query: str, top_k: int = 3) -> list[str]:
        words = dict.fromkeys(split(query[: 32 * MAX_QUERY_WORDS])[:MAX_QUERY_WORDS])
        known = [word for word in words if word in self.index.vocab_dict]
        if not known:
            return []
        scores = self.index.get_scores(known)
        last = max(len(scores) - top_k, 0)
        least = scores[scores.argpartition(last)[last]]  # the score of the last that may be shown
        found = ((scores >= least) & (scores > 0)).nonzero()[0].tolist()
        best = sorted(found, key=lambda document: (-scores[document], document))[:top_k]
        return [self.texts[document] for document in best]

    def search_batch(self, queries: list[str], top_k: int = 3) -> list[list[str]]:
        return [self.search(query, top_k) for query in queries]


@lru_cache(maxsize=1)
def read_documents(path: str) -> Documents:
    """Those of a file, which is read once for training and evaluation."""
    return Documents(path)


class World(Retriever):
    """4,096 people with two-word names and six relations, each of which leads from everybody to one other person."""

    def __init__(self, seed: int = 0):
        generator = random.Random(f"world {seed}")
        self.people = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
        self.facts = {}  # (person, relation) -> person
        for person in self.people:
            for relation in RELATIONS:
                while (other := generator.choice(self.people)) == person:
                    pass
                self.facts[person, relation] = other
        self.order = list(self.facts)
        generator.shuffle(self.order)  # equal scores keep this order, which favours no relation
        super().__init__([(person, self.sentence(person, relation)) for person, relation in self.order])

    def sentence(self, person: str, relation: str) -> str:
        return f"{person}'s {relation} is {self.facts[person, relation]}."

    def lookup(self, person: str, relation: str) -> str | None:
        """The exact tool: no ranking, one answer or none."""
        return self.facts.get((person, relation))


class HttpRetriever:
    """Client of a Search-R1 retrieval server: one POST for a batch of queries, without dependencies. If the server is
    away, eight attempts with two minutes of pauses.

    A document's contents are a title in quotes, a line break, the text. What goes wrong is one sentence:
    ConnectionError when there is no answer, ValueError when the answer is none of that protocol.
    """

    def __init__(self, url: str, timeout: float = 60.0, pause: float = 1.0):
        if not re.fullmatch(r"https?://([\w.%@-]+|\[[\da-fA-F:.]+\])(:\d+)?([/?][!-~]*)?", url, re.ASCII):
            raise ValueError(f"retriever url {url!r}: expected something like http://127.0.0.1:8000/retrieve")
        self.url, self.timeout, self.pause = url, timeout, pause

    def search_batch(self, queries: list[str], top_k: int = 3) -> list[list[str]]:
        if not queries:
            return []
        body = json.dumps({"queries": queries, "topk": top_k, "return_scores": True}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        for attempt in range(8):
            time.sleep(self.pause * 2 ** (attempt - 1) if attempt else 0)
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    answer = response.read()
                break
            except (OSError, http.client.HTTPException) as error:
                reason = error
                code = getattr(error, "code", 500)
                if code // 100 in (3, 4) and code not in (408, 429):  # a wrong request, not a busy server
                    place = getattr(error, "headers", {}).get("Location")
                    said = f"{error}, it is at {place}" if place else f"{error} {start_of(error)}"
                    raise ConnectionError(f"retriever {self.url}: {said}".rstrip()) from None
        else:
            raise ConnectionError(f"retriever {self.url}: no answer in eight attempts ({reason})") from None
        try:
            rows = json.loads(answer)["result"]
            found = [[one_line(item["document"]["contents"])[:MAX_DOCUMENT_CHARS] for item in row] for row in rows]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            found = None
        if found is None or len(found) != len(queries):
            expected = f'{{"result": [...]}} with {len(queries)} lists of {{"document": {{"contents": "..."}}}}'
            raise ValueError(f"retriever {self.url}: answered {answer[:80]!r}, expected {expected}")
        return [row[:top_k] for row in found]


def one_line(contents: str) -> str:
    """A title in quotes, a line break and a text as one line, without the title if the text begins with it."""
    title, _, text = contents.encode("utf-8", "replace").decode().partition("\n")
    title, text = title.strip().strip('"'), " ".join(text.split())
    return text if text.startswith(title) else f"{title}: {text}" if text else title


def read_document(row: dict, where: str) -> str:
    """Title, line break and text of a row of a file of documents; a ValueError of one sentence if it is broken."""
    title, text = row.get("title") or "", row.get("contents", row.get("text"))
    if not isinstance(title, str) or not isinstance(text, str):
        raise ValueError(f"{where}: found {row!r:.60}, expected title and text")
    return text if "contents" in row else f"{' '.join(title.split())}\n{text}"


def start_of(error: urllib.error.HTTPError) -> str:
    """The first 200 characters of what a server says beside its code, as one line."""
    try:
        return " ".join(error.read(800).decode("utf-8", "replace").split())[:200]
    except (OSError, http.client.HTTPException):
        return ""


def split(text: str) -> list[str]:
    """The words of a text in lower case."""
    return re.findall(r"[^\W_]+", text.lower())
