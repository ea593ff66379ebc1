"""Problems and gold answers in the layouts in which the field publishes them.

A file is JSON (an array, or one object per line), Parquet or CSV; a record names its problem and its answer in one of
a few ways, told apart by the columns that are there and not by the name of the data set. So a copy of a set from
another place loads as well as the original.
"""

import codecs
import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurl.tasks.formats import FORMATS

SUFFIXES = (".json", ".jsonl", ".parquet", ".csv")
_PROBLEM_COLUMNS = ("problem", "question", "Problem", "Question", "prompt")
_ANSWER_COLUMNS = ("final_answer", "answer", "Answer")
_ID_COLUMNS = ("unique_id", "id", "ID", "idx")
# One array of a Parquet batch at a time, so that DAPO's 1.79 million rows never lie in memory together.
_BATCH_ROWS = 10_000


class RecordError(ValueError):
    """A file is not readable, or its records have no problem or answer."""


@dataclass(frozen=True)
class Problem:
    """A problem as read from a record.

    Attributes
    ----------
    text : str
        Bare: prompts that a layout has already put around it are taken off. Empty where the record has none.
    gold : str, list of str or None
        The answer; several where each of them is right; None where the record has none.
    id : str or None
    tolerance : float or None
        Absolute error that the data set allows.
    """

    text: str
    gold: str | list[str] | None
    id: str | None
    tolerance: float | None


def read_file(file: Path) -> Iterator[dict[str, Any]]:
    """Records of a file, in order.

    Raises
    ------
    RecordError
        If the file is in none of the formats, or damaged.
    """
    try:
        if file.suffix == ".parquet":
            yield from _read_parquet(file)
        elif file.suffix == ".csv":
            with open(file, encoding="utf-8-sig", newline="") as stream:
                yield from csv.DictReader(stream)
        elif file.suffix in (".json", ".jsonl"):
            yield from _read_json(file)
        else:
            raise RecordError(f"{file} is no data file: give one that ends in {', '.join(SUFFIXES)}.")
    except UnicodeDecodeError as error:
        raise RecordError(f"{file} cannot be read ({error}): {_encoding_advice(file)}.") from None
    except (json.JSONDecodeError, csv.Error) as error:
        raise RecordError(f"{file} cannot be read ({error}): download it again.") from None


def _encoding_advice(file: Path) -> str:
    """What to do about a file that is not UTF-8: text in another encoding, as spreadsheets write it, or no text."""
    content = file.read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "UTF-16"
    elif not any(byte < 9 for byte in content):  # no text has NUL or the like
        encoding = "Latin-1 or Windows-1252"
    else:
        return "download it again"
    return f"its text is probably {encoding}, save it as UTF-8"


def _read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            wanted = {
                *_PROBLEM_COLUMNS,
                *_ANSWER_COLUMNS,
                *_ID_COLUMNS,
                "context",
                "reward_model",
                "extra_info",
            }
            wanted |= {"solution", "is_multiple_answer", "error"}
            columns = [name for name in table.schema_arrow.names if name in wanted]
            for batch in table.iter_batches(_BATCH_ROWS, columns=columns):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise RecordError(f"{file} cannot be read ({error}): download it again.") from None


def _read_json(file: Path) -> Iterator[dict[str, Any]]:
    text = file.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        records = json.loads(text)
    else:  # one object per line, whatever the file is called
        records = [json.loads(line) for line in text.split("\n") if line.strip()]
    for index, record in enumerate(records):
        if not isinstance(record, dict):
            raise RecordError(
                f"{file}: entry {index} is no object with named fields: give one object per problem."
            )
        yield record


def read_problem(record: Mapping[str, Any]) -> Problem:
    """Find the parts of a record.

    Raises
    ------
    RecordError
        If no column of the record can hold a problem or an answer.
    """
    return Problem(_text(record), _gold(record), _id(record), _tolerance(record.get("error")))


def _text(record: Mapping[str, Any]) -> str:
    column = next((name for name in _PROBLEM_COLUMNS if name in record), None)
    if column is None:
        raise RecordError(f"has no problem: name its column one of {', '.join(_PROBLEM_COLUMNS)}.")
    text = record[column]
    if isinstance(text, list) and all(isinstance(message, Mapping) for message in text):
        text = next(
            (message.get("content") for message in reversed(text) if message.get("role") == "user"), ""
        )
    if isinstance(text, list | Mapping):
        raise RecordError(f"has {column}={text!r:.60}: give a text, or messages whose content is one.")
    text = str(text or "").strip()
    for answer_format in FORMATS.values():
        text = answer_format.problem_of(text)
    context = str(record.get("context") or "").strip()  # OlympiadBench
    return f"{context}\n\n{text}" if context and text else text


def _gold(record: Mapping[str, Any]) -> str | list[str] | None:
    model = record.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:  # verl's layout, as of DAPO
        values = model["ground_truth"]
    else:
        column = next((name for name in _ANSWER_COLUMNS if name in record), None)
        if column is not None:
            values = record[column]
        elif "solution" in record:
            from qurl.answers import extract_answer

            values = extract_answer(str(record["solution"] or ""), lenient=False)
        else:
            raise RecordError(f"has no answer: name its column one of {', '.join(_ANSWER_COLUMNS)}.")
    values = values if isinstance(values, list) else [values]
    if any(isinstance(value, list | Mapping) for value in values):
        raise RecordError(f"has the answer {values!r:.60}: give a text or a number, or a list of these.")
    texts = [_gold_text(value) for value in values]
    texts = list(dict.fromkeys(text for text in texts if text))
    if not texts:
        return None
    if record.get("is_multiple_answer"):  # OlympiadBench: all of them
        return ", ".join(texts)
    return texts[0] if len(texts) == 1 else texts


def _gold_text(value: Any) -> str:
    """``142.0`` → "142", ``"025"`` → "025", a GSM8K solution → what stands behind its ####, null → "" """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value).strip()
    if "####" in text:
        return text.rpartition("####")[2].strip().replace(",", "")
    return text


def _id(record: Mapping[str, Any]) -> str | None:
    extra = record.get("extra_info")
    value = next((record[name] for name in _ID_COLUMNS if record.get(name) is not None), None)
    if value is None and isinstance(extra, Mapping):
        value = extra.get("index")
    return None if value is None else str(value)


def _tolerance(error: Any) -> float | None:
    try:
        tolerance = float(error)
    except (TypeError, ValueError):
        return None
    return tolerance if 0 < tolerance < math.inf else None
