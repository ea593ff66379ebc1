r"""Where in a completion the answer stands.

In order: the last complete ``\boxed{}`` or ``\fbox{}``; ``Answer: …`` (also ``<answer>…</answer>``); the first
``#### …``. Lenient extraction goes on with what is bold or follows "answer is", then a text that is nothing but an
answer, then the last number. Unfinished thinking does not count, nor does text that opens a new question after
the answer. An unclosed box, with no complete one before it, is no answer, and nothing else is looked at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .spelling import tidy


@dataclass(frozen=True)
class Extraction:
    """An answer as it was found.

    Attributes
    ----------
    text : str
        The answer's text, None where there is none.
    how : str
        ``box``, ``answer``, ``hashes``, ``stated``, ``whole``, ``number``, or why there is none: ``unclosed
            box``, ``empty``, ``nothing found``.
    joined : str, optional
        Several boxes in a row (``\\boxed{4}, \\boxed{9}``) as one list, for golds that list several values.
    """

    text: str | None
    how: str
    joined: str | None = None


_THINK = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"[\s,;$]*(?:(?:and|or|\\text\{\s*(?:and|or)\s*\})[\s,;$]*)?", re.IGNORECASE)
_NEW_QUESTION = re.compile(
    r"(?:^|(?<=[\n.!?}$\d\])*]))[ \t]*(?:#+ *|\*\*)?"
    r"(?:(?:New |Next )?(?:Question|Problem|Exercise|Q)(?: *\d+)?(?:\*\*)? *:"
    r"|(?:Question|Problem|Exercise) \d+ *\.|(?:Human|User|Instruction) *:|\[INST\])"
    r"|<\|(?:im_start|user|start_header_id|endoftext|im_end|eot_id)\|>",
)
_ANSWER = re.compile(
    r"\banswer(?: is)?\s*(?:\*\*|__)?\s*:(?!\s*$)[ \t]*(?:\*\*|__)?[ \t]*(?:\n\s*)?([^\n]*)", re.IGNORECASE
)
_ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_HASHES_NUMBER = re.compile(r"####(?!#)[ \t]*[-+$\\]*\d[\d,.]*")
_HASHES = re.compile(r"####(?!#)[ \t]*([^\n]*)")
_STATED = re.compile(
    r"\*\*(?!\s)([^*\n]{1,200}?)\*\*"
    r"|\banswer\b(?:[^.\n]{0,60}?)\b(?:is|are|equals|be)\b:?[ \t]*(?:\n\s*)?([^\n]{1,300})",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"(?:(?<![\w)}\]])-)?(?:\\?\$ ?)?(?:(?<![\w)}\]])-)?"
    r"(?:\d{1,3}(?:(?:,\\!|\{,\}|,)\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\d)\.\d+)"
    r"(?:[eE][-+]?\d+|\s?(?:\\times|\\cdot|×|\*)\s?10\s?\^\s?(?:\{[-+]?\d+\}|-?\d+))?"
    r"(?: \d+)?(?:\s?[/:]\s?\d+)?(?:\s?(?:\\?%|percent\b|pct\b))?"
)
_MATH = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$\n]+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SMALL_WORDS = re.compile(r"(?i:is|are|the|it|so|we|thus|hence|therefore|because|since|have|get)")
_NO_PROSE = re.compile(
    r"(?i:(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*)"
    r"|(?i:sqrt|pi|sin|cos|tan|log|ln|rs|usd|eur|or|and|max|min)"
    r"|[A-Z]{2,4}",
)
_SEARCH_WINDOW = 20_000  # characters from the end, for the searches of lenient extraction


def _visible(text: str) -> tuple[str, str]:
    """Split a completion into (what it says, finished thinking); unfinished thinking is dropped."""
    said, thought, start, thinking = [], [], 0, False
    for tag in _THINK.finditer(text):
        piece = text[start : tag.start()]
        if tag[1]:  # a closing tag without an opening one: the prompt opened it
            thought += [piece] if thinking or not thought else []
            if not (thinking or (len(thought) == 1 and not said)):
                said.append(piece)
            elif not thinking:
                said.clear()
            thinking = False
        else:
            (thought if thinking else said).append(piece)
            thinking = True
        start = tag.end()
    if not thinking:
        said.append(text[start:])
    return "".join(said), "".join(thought)


def _boxes(text: str) -> tuple[list[tuple[int, int, str]], bool]:
    """All complete boxes as (start, end, content), outermost only, and whether one stayed open."""
    starts = [(m.start(), m.end()) for m in _BOX.finditer(text)]
    if not starts:
        return [], False
    # One pass over the braces finds every match, however deeply and badly they are nested.
    stack, closing = [], {}
    for brace in _BRACE.finditer(text, starts[0][1]):
        if brace[0] == "{":
            stack.append(brace.start())
        elif brace[0] == "}" and stack:
            closing[stack.pop()] = brace.start()
    found, is_open, end = [], False, 0
    for start, inside in starts:
        if start < end:
            continue
        if text[inside : inside + 1] != "{":  # \boxed 7 is LaTeX, too
            token = re.compile(r"[-+]?[\d.,]*\d|[A-Za-z](?![A-Za-z])").match(text, inside)
            if token:
                found.append((start, token.end(), token[0]))
        elif inside in closing:
            end = closing[inside] + 1
            found.append((start, end, text[inside + 1 : end - 1]))
        else:
            is_open = True
    return found, is_open


def _says_something(content: str) -> bool:
    return len(content) > 1000 or tidy(content) != ""


def _before_new_question(text: str) -> str:
    """Cut run-on text: everything from the first new question that follows an answer."""
    boxes = _boxes(text)[0]
    answers = [boxes[0][1] if boxes else None]
    answers += [
        m.end() if (m := pattern.search(text)) else None for pattern in (_HASHES_NUMBER, _ANSWER, _STATED)
    ]
    first = min((end for end in answers if end is not None), default=None)
    for mark in _NEW_QUESTION.finditer(text):
        if (mark[0].startswith("<") and mark.start()) or (first is not None and first <= mark.start()):
            return text[: mark.start()]
    return text


def _tagged(text: str) -> str | None:
    """What the last ``<answer>…</answer>`` holds."""
    inside, opened = None, None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag[1]:
            opened = tag.end()
        elif opened is not None:
            inside, opened = text[opened : tag.start()].strip() or inside, None
    return inside


def _is_prose(text: str) -> bool:
    """Whether a text is a sentence rather than an answer.

    Signs of one: four words, one of a sentence's small words, or a word before the first number (``You pay 18``)
    that is no name (``AB = 18``), month, function or currency.
    """
    text = re.sub(r"\\text\s*\{[^{}]*\}|\\[a-zA-Z]+|\\begin\{[a-z]*\}|\\end\{[a-z]*\}", " ", text)
    found = re.findall(r"[A-Za-z]{2,}", text)
    if len(found) > 3 or any(_SMALL_WORDS.fullmatch(word) for word in found):
        return True
    before = re.match(r"\D*", text)[0]
    if not re.search(r"\d", text) or re.fullmatch(r"\s*[A-Za-z]+\s*[=:].*", before, re.DOTALL):
        return False
    return any(not _NO_PROSE.fullmatch(word) for word in re.findall(r"[A-Za-z]{2,}", before))


def _clip(segment: str) -> str:
    """The answer at the beginning of a segment: all of it, or its first formula, number or word where it is prose."""
    segment = segment.strip().strip("*_").strip()
    sentence = re.match(r"(?:[^.!?\n]|[.!?](?=\S))*", segment)[0].strip().strip("*")
    if not _is_prose(sentence):
        return sentence
    if math := _MATH.search(sentence):
        return next(group for group in math.groups() if group is not None)
    if number := _NUMBER.search(sentence):
        return number[0]
    return ""


def _stated(text: str) -> str | None:
    """The last thing in bold or after "answer is" that can be an answer."""
    for match in reversed(list(_STATED.finditer(text[-_SEARCH_WINDOW:]))):
        segment = match[1] if match[1] is not None else match[2]
        if match[1] is not None and (
            segment.rstrip().endswith(":") or re.search(r"\banswer\b|^step\b", segment, re.I)
        ):
            continue  # a heading
        segment = _clip(
            segment.split("**")[0] if match[1] is None and not segment.startswith("**") else segment
        )
        if re.search(r"\w", segment):
            return segment
    return None


def _last_number(text: str) -> str | None:
    """The last number, with the whole formula that it stands in, if any."""
    text = text[-_SEARCH_WINDOW:]
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    number = numbers[-1]
    for math in _MATH.finditer(text):
        if math.start() < number.end() and number.start() < math.end():
            inside = next(group for group in math.groups() if group is not None)
            if not _is_prose(inside):
                return inside
    return number[0]


def _hashes(text: str) -> Extraction | None:
    """GSM8K's marker: the first ``####`` that is not a Markdown heading."""
    for match in _HASHES.finditer(text):
        line = match[1].strip().strip("*").strip()
        if not re.search(r"\w", line):
            return Extraction(None, "empty")
        if re.match(r"[-+]?\s*(?:\\?[$€£]|\\[a-zA-Z]|[\d.(\[{-])|[A-Za-z]\s*=", line):
            number = _NUMBER.match(line)
            whole = not _is_prose(line) and not _NEW_QUESTION.search(line)
            return Extraction(line if whole or not number else number[0], "hashes")
        if re.fullmatch(r"[A-Za-z]+\.?", line) and not text[match.end() :].strip():
            return Extraction(line, "hashes")
    return None


def find_answer(text: str, *, lenient: bool = True) -> Extraction:
    """Find the answer in a completion.

    Parameters
    ----------
    text : str
        The completion; any string.
    lenient : bool
        Also look for answers that stand behind no marker.
    """
    said, thought = _visible(text)
    said = _before_new_question(said)
    boxes, is_open = _boxes(said)
    if boxes:
        last = boxes[-1][2].strip()
        joined = [last]
        for (_, end, content), (start, _, _) in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
            if start - end > 20 or not _BETWEEN_BOXES.fullmatch(said, end, start):
                break
            joined.insert(0, content.strip())
        if not _says_something(last):
            return Extraction(None, "empty")
        return Extraction(last, "box", ", ".join(joined) if len(set(joined)) > 1 else None)
    if is_open:
        return Extraction(None, "unclosed box")
    if tagged := _tagged(said):
        return Extraction(_clip(tagged) or tagged, "answer")
    for match in reversed(list(_ANSWER.finditer(said))):
        if re.search(r"\w", segment := _clip(match[1])):
            return Extraction(segment, "answer")
    if hashes := _hashes(said):
        return hashes
    if lenient and (stated := _stated(said)) is not None:
        return Extraction(stated, "stated")
    if thought and (boxes := _boxes(thought)[0]) and _says_something(boxes[-1][2]):
        return Extraction(boxes[-1][2].strip(), "box")
    if lenient:
        line = said.strip()
        if line and len(line) <= 300 and not _is_prose(line) and re.search(r"\w", line):
            return Extraction(line, "whole")
        if (number := _last_number(said)) is not None:
            return Extraction(number, "number")
    return Extraction(None, "nothing found")
