"""What trainers, evaluation and notebooks know of a task, whatever its data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qurl.rewards import Accuracy, RewardFunction
from qurl.tasks.formats import AnswerFormat

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from qurl.answers import Verdict


# Rows in which `Task.self_check` looks for a gold answer that can be read.
_ROWS_TO_CHECK = 100


class TaskError(ValueError):
    """A task does not fit the model's tokenizer, or does not reward a right answer in its own format."""


@dataclass(frozen=True)
class Task:
    """Problems with gold answers, how to ask for them and how to reward a completion.

    Attributes
    ----------
    name : str
    split : str
    dataset : datasets.Dataset
        One row per problem, as TRL's GRPO trainer takes it: ``prompt`` (a text, or messages where the task is asked as
        a chat), ``answer`` (the gold answer), ``id`` (unique within the task), ``problem`` (its bare text).
    answer_format : AnswerFormat
    provenance : dict
        Where the rows come from and what was left out, for the result of a run.
    """

    name: str
    split: str
    dataset: "datasets.Dataset"
    answer_format: AnswerFormat
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def lenient(self) -> bool:
        """Whether an answer counts that is not in the format the prompt asks for."""
        return self.answer_format.lenient

    @property
    def chat(self) -> bool:
        """Whether the prompts are messages."""
        return not isinstance(self.dataset[0]["prompt"], str)

    def check(self, completion: str, gold: str | Sequence[str], tolerance: float | None = None) -> "Verdict":
        """`check_many` for one completion."""
        return self.check_many([completion], [gold], [tolerance])[0]

    def check_many(
        self,
        completions: Sequence[str],
        golds: Sequence[str | Sequence[str]],
        tolerances: Sequence[float | None] | None = None,
    ) -> list["Verdict"]:
        """Judge the texts of completions; the one judgement behind rewards and evaluation.

        Parameters
        ----------
        completions : sequence of str
        golds : sequence of str or of sequences of str
            Several are alternatives, each of them right.
        tolerances : sequence of float or None, optional
            Absolute errors that the data set allows.

        Returns
        -------
        list of qurl.answers.Verdict
            ``correct`` is None where the gold answer cannot be read.
        """
        if self.answer_format.exact:
            return [_compare(text, gold) for text, gold in zip(completions, golds, strict=True)]
        from qurl.answers import check_many

        allowed = list(tolerances) if tolerances is not None else [None] * len(completions)
        verdicts: list[Verdict | None] = [None] * len(completions)
        for tolerance in dict.fromkeys(allowed):  # check_many takes one for all
            chosen = [index for index, other in enumerate(allowed) if other == tolerance]
            judged = check_many(
                [completions[index] for index in chosen],
                [golds[index] for index in chosen],
                lenient=self.lenient,
                tolerance=tolerance,
            )
            for index, verdict in zip(chosen, judged, strict=True):
                verdicts[index] = verdict
        return verdicts

    def reward_functions(self) -> list[RewardFunction]:
        """The task's rewards, for TRL's ``reward_funcs``; new ones at each call, as they count."""
        return [Accuracy(self.check_many)]

    def render(self, row: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
        """Token ids of a row's prompt, exactly those that TRL's trainer computes.

        Parameters
        ----------
        row : mapping
            A row of ``dataset``.
        tokenizer : transformers.PreTrainedTokenizerBase

        Returns
        -------
        list of int
            With the start token once where the tokenizer or its chat template puts one, and ready to be continued.

        Raises
        ------
        TaskError
            If the prompt is a chat and the tokenizer has no chat template, or two start tokens would come first.
        """
        prompt = row["prompt"]
        if isinstance(prompt, str):
            ids = tokenizer(text=prompt)["input_ids"]
        elif tokenizer.chat_template is None:
            raise TaskError(
                f"task {self.name!r} asks in chat form, for which the tokenizer has no template: load the task with "
                "chat=False, or use an instruction-tuned model."
            )
        else:
            ids = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
            raise TaskError(
                f"prompts of task {self.name!r} would begin with two start tokens {tokenizer.bos_token!r}: take it out "
                "of the prompt's text or of the chat template."
            )
        return ids

    def self_check(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Render a prompt, answer it in the task's own format, and make sure that this is rewarded with 1.

        Both texts go through the tokenizer, so a model that cannot read or write them is found out before it is run.

        Raises
        ------
        TaskError
            With the text that failed.
        """
        row, gold = self._first_readable()
        prompt = tokenizer.decode(self.render(row, tokenizer))
        text = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        if text.strip() not in prompt:
            raise TaskError(
                f"the tokenizer cannot spell prompts of task {self.name!r}: {text!r} became {prompt!r}; use a model "
                "whose vocabulary covers them."
            )
        answer = self.answer_format.obey(gold)
        ids = tokenizer(text=answer, add_special_tokens=False)["input_ids"]
        answer = tokenizer.decode(ids, skip_special_tokens=True)
        completion = answer if isinstance(row["prompt"], str) else [{"role": "assistant", "content": answer}]
        columns = {key: [value] for key, value in row.items() if key != "prompt"}
        for function in self.reward_functions():
            (reward,) = function(
                prompts=[row["prompt"]], completions=[completion], completion_ids=[ids], **columns
            )
            if reward != 1:
                raise TaskError(
                    f"task {self.name!r} rewards a right answer in its own format with {reward}: gold {gold!r}, "
                    f"completion {answer!r}; choose another answer_format."
                )

    def _first_readable(self) -> tuple[dict[str, Any], str]:
        """The first row with a gold answer that can be read, and that gold."""
        from qurl.answers import gold_problem

        problem = None
        for row in self.dataset.select(range(min(len(self.dataset), _ROWS_TO_CHECK))):
            for gold in [row["answer"]] if isinstance(row["answer"], str) else row["answer"]:
                reason = None if self.answer_format.exact else gold_problem(gold)
                if reason is None:
                    return row, gold
                problem = problem or f"{gold!r}: {reason}"
        raise TaskError(
            f"task {self.name!r} has no gold answer that can be read in its first "
            f"{min(len(self.dataset), _ROWS_TO_CHECK)} rows ({problem}): correct the answers of its file."
        )


def _compare(completion: str, gold: str) -> "Verdict":
    from qurl.answers import Verdict

    same = completion == gold
    return Verdict(same, completion or None, "whole", "same text" if same else "different texts", gold)
