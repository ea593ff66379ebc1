"""How a prompt asks for an answer, and how an answer that obeys looks: the two must match, so they stand together."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AnswerFormat:
    """One way of asking.

    Attributes
    ----------
    name : str
    template : str
        The user's text, with ``{problem}`` in it once.
    completion : str
        A completion that obeys, with ``{answer}`` in it once; what `qurl.tasks.Task.self_check` answers with.
    pattern : str
        Regular expression that occurs in completions that obey, for `qurl.rewards.Format`.
    lenient : bool
        Whether an answer elsewhere in the text counts too: the last number, or what follows "answer is". Prompts that
        ask for a box are strict.
    exact : bool
        Whether the whole completion must be the answer, character by character.
    """

    name: str
    template: str
    completion: str
    pattern: str
    lenient: bool = False
    exact: bool = False

    def ask(self, problem: str) -> str:
        """The user's text for a problem."""
        return self.template.replace("{problem}", problem)

    def obey(self, answer: str) -> str:
        """A completion that gives ``answer`` as asked."""
        return self.completion.replace("{answer}", answer)

    def problem_of(self, text: str) -> str:
        """The problem in a user's text, whether or not it was put into this template before."""
        before, after = self.template.split("{problem}")
        stripped = text.strip()
        if stripped.startswith(before.strip()) and stripped.endswith(after.strip()):
            return stripped.removeprefix(before.strip()).removesuffix(after.strip()).strip()
        return stripped


FORMATS = {
    answer_format.name: answer_format
    for answer_format in (
        # DeepScaleR, also for its five test sets.
        AnswerFormat(
            "boxed",
            "{problem} Let's think step by step and output the final answer within \\boxed{}.",
            "Step by step, this gives \\boxed{{answer}}.",
            r"\\boxed\{",
        ),
        # DAPO.
        AnswerFormat(
            "answer_line",
            "Solve the following math problem step by step. The last line of your response should be of the form "
            "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
            'Remember to put your answer on its own line after "Answer:".',
            "Step by step, this gives the result.\n\nAnswer: ${answer}$",
            r"(^|\n)Answer: *\S[^\n]*\s*$",
        ),
        # GSM8K, as its solutions end and as verl asks.
        AnswerFormat(
            "hashes",
            '{problem} Let\'s think step by step and output the final answer after "####".',
            "Step by step, this gives the result.\n#### {answer}",
            r"(^|\n)#### *\S",
            lenient=True,
        ),
        # Small chat models: a term, and the last number of the reply. Of five wordings SmolLM2 obeys this best.
        AnswerFormat(
            "number",
            "Calculate {problem} and reply with the number only.",
            "The answer is {answer}.",
            r"^\D*\d[\d,.]*\D*$",
            lenient=True,
        ),
        # Models that only ever saw such lines, as the embedded `tiny`.
        AnswerFormat("exact", "{problem}", "{answer}", r"^\S+$", exact=True),
    )
}
