"""Write the sample sets of this folder: problems made up for this project, in the layouts of the published data sets.

python data/tasks/write_samples.py
"""

import hashlib
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

FOLDER = Path(__file__).resolve().parent
ANSWER_LINE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its "
    'own line after "Answer:".'
)

# Question, worked solution with GSM8K's calculator marks, answer.
WORD_PROBLEMS = {
    "train": [
        (
            "A tram has 6 cars with 48 seats each. How many seats does it have?",
            "It has 6*48=<<6*48=288>>288 seats.",
            "288",
        ),
        (
            "Ida reads 14 pages a day for 3 weeks. How many pages does she read?",
            "She reads on 21 days, 14*21=<<14*21=294>>294 pages.",
            "294",
        ),
        (
            "A rope of 90 metres is cut into pieces of 6 metres. How many pieces are there?",
            "90/6=<<90/6=15>>15.",
            "15",
        ),
        (
            "Tickets cost $12, and $7 for children. What do 2 adults and 5 children pay, in dollars?",
            "2*12=<<2*12=24>>24 and 5*7=<<5*7=35>>35, together <<24+35=59>>59.",
            "59",
        ),
        (
            "A printer prints 35 pages a minute. How many does it print in one hour?",
            "35*60=<<35*60=2100>>2100 pages.",
            "2,100",
        ),
        (
            "Omar had 125 stamps, gave away 40 and bought 18. How many does he have?",
            "125-40+18=<<125-40+18=103>>103.",
            "103",
        ),
        (
            "A farm ships 1,250 crates of 8 melons. How many melons is that?",
            "1250*8=<<1250*8=10000>>10000.",
            "10,000",
        ),
        (
            "It was -4 degrees and got 9 degrees colder. What is the temperature now?",
            "-4-9=<<-4-9=-13>>-13.",
            "-13",
        ),
    ],
    "test": [
        (
            "A baker makes 18 trays of 12 rolls and sells 150 rolls. How many are left?",
            "18*12=<<18*12=216>>216, then 216-150=<<216-150=66>>66.",
            "66",
        ),
        (
            "A bus drives 60 km an hour for 2.5 hours. How many km does it drive?",
            "60*2.5=<<60*2.5=150>>150.",
            "150",
        ),
        (
            "Nora saves $35 a month. How many dollars has she saved after two years?",
            "35*24=<<35*24=840>>840.",
            "840",
        ),
        (
            "A school buys 40 chairs at $35 each. What does it pay, in dollars?",
            "40*35=<<40*35=1400>>1400.",
            "1,400",
        ),
        ("Three friends share 84 marbles equally. How many does each get?", "84/3=<<84/3=28>>28.", "28"),
        (
            "A tank holds 500 litres and is 30% full. How many litres are missing?",
            "It holds 500*0.3=<<500*0.3=150>>150, so 500-150=<<500-150=350>>350 are missing.",
            "350",
        ),
        (
            "Lea runs 3 rounds of 400 metres on each of 5 days. How many metres does she run?",
            "3*400*5=<<3*400*5=6000>>6000.",
            "6,000",
        ),
        (
            "A box of 24 pencils costs $6. What does one pencil cost, in cents?",
            "600/24=<<600/24=25>>25.",
            "25",
        ),
    ],
}
# Problem, solution, answer.
COMPETITION = [
    ("Find the sum of all positive divisors of $28$.", "$1+2+4+7+14+28=\\boxed{56}$.", "56"),
    (
        "Write $0.\\overline{36}$ as a fraction in lowest terms.",
        "$36/99=\\boxed{\\frac{4}{11}}$.",
        "\\frac{4}{11}",
    ),
    ("What is the remainder of $7^{100}$ divided by $5$?", "$7^4\\equiv 1$, so it is $\\boxed{1}$.", "1"),
    (
        "Give the point on the line $y=2x+1$ whose first coordinate is $-3$.",
        "$2\\cdot(-3)+1=-5$: $\\boxed{(-3,-5)}$.",
        "(-3,-5)",
    ),
    ("Solve $x^2<9$ and give the solutions as an interval.", "$\\boxed{(-3,3)}$.", "(-3,3)"),
    ("Simplify $\\sqrt{72}$.", "$\\sqrt{36\\cdot 2}=\\boxed{6\\sqrt{2}}$.", "6\\sqrt{2}"),
    ("In how many ways can $5$ different books be put on a shelf?", "$5!=\\boxed{120}$.", "120"),
    ("Expand $(x+3)^2$.", "$\\boxed{x^2+6x+9}$.", "x^2+6x+9"),
]
# Problem, answer from 0 to 999.
INTEGER_PROBLEMS = [
    ("Find the number of positive multiples of $7$ below $1000$.", 142),
    ("The sum of two numbers is $20$ and their product is $91$. Find the larger one.", 13),
    ("Find the smallest positive integer with exactly $6$ positive divisors.", 12),
    ("How many diagonals does a convex polygon with $20$ sides have?", 170),
    ("Find $1+2+3+\\cdots+40$.", 820),
    ("A right triangle has legs $15$ and $20$. Find its hypotenuse.", 25),
    ("How many three-digit numbers have only odd digits?", 125),
    ("Find the number of trailing zeros of $35!$.", 8),
]
# Problem, spellings of the answer.
SCIENCE = [
    ("A spring of constant $200$ N/m is stretched by $0.05$ m. Find the force in newtons.", ["10\n"]),
    ("How many metres does light travel in $2$ s? Use $c=3\\times 10^8$ m/s.", ["6 \\times 10^8\n", "6e8\n"]),
    ("Find the current in amperes through $8$ ohms at $12$ V.", ["1.5\n"]),
    ("Solve $y'=2y$ with $y(0)=3$.", ["y=3e^{2t}\n", "3 e^{2 t}\n"]),
    ("Find the kinetic energy in joules of $4$ kg moving at $3$ m/s.", ["18\n"]),
    ("A wave of $50$ Hz has a length of $6.8$ m. Find its speed in m/s.", ["340\n"]),
    ("Find the determinant of $\\begin{pmatrix}2&1\\\\3&5\\end{pmatrix}$.", ["7\n"]),
    (
        "At which angle in degrees to the normal is light of incidence $25^\\circ$ reflected?",
        ["25^{\\circ}\n", "25\n"],
    ),
]
# Problem, answer, all of several?, type, unit, error.
OLYMPIAD = [
    ("Find all real $x$ with $x^2=x$.", "$0$,$1$", True, "Numerical", None, None),
    ("Find all pairs $(a,b)$ of positive integers with $ab=3$.", "$(1,3),(3,1)$", True, "Tuple", None, None),
    ("Find the largest $n$ such that $2^n$ divides $48$.", "4", False, "Numerical", None, None),
    ("For which real $x$ is $\\sqrt{5-x}$ defined?", "$(-\\infty, 5]$", False, "Interval", None, None),
    ("Give the sum of the angles of a hexagon.", "720", False, "Numerical", "^{\\circ}", None),
    ("Factor $n^2-1$.", "$(n-1)(n+1)$", False, "Expression", None, None),
    (
        "A train needs $3$ h for $250$ km. Find its mean speed to one decimal place.",
        "83.3",
        False,
        "Numerical",
        "km/h",
        "1e-1",
    ),
    ("Find $\\binom{8}{3}$.", "$56$", False, "Numerical", None, None),
]


def write_json(name: str, records: list[dict]) -> None:
    (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
    (FOLDER / name).write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")


def write_lines(name: str, records: list[dict]) -> None:
    (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
    (FOLDER / name).write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def write_parquet(name: str, records: list[dict]) -> None:
    (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), FOLDER / name)


def main() -> None:
    for split, problems in WORD_PROBLEMS.items():
        records = [
            {"question": question, "answer": f"{worked}\n#### {answer}"}
            for question, worked, answer in problems
        ]
        write_lines(f"gsm8k/{split}.jsonl", records)
    competition = [
        {"problem": problem, "answer": answer, "solution": solution}
        for problem, solution, answer in COMPETITION
    ]
    # As in the original: some rows twice, some without an answer.
    unanswered = {"problem": "Find all values.", "answer": None, "solution": ""}
    write_json("deepscaler/deepscaler.json", [*competition, competition[0], unanswered])
    write_lines(
        "math500/test.jsonl",
        [
            record | {"subject": "Algebra", "level": 3, "unique_id": f"test/sample/{index}.json"}
            for index, record in enumerate(competition)
        ],
    )
    dapo = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": ANSWER_LINE.format(problem), "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(answer), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"sample-{index}"},
        }
        for index, (problem, answer) in enumerate(INTEGER_PROBLEMS)
    ]
    write_parquet("dapo/dapo-math-17k.parquet", dapo * 3)
    write_json(
        "aime24/aime.json",
        [
            {
                "problem": problem,
                "answer": f"{answer:03d}",
                "year": 2024,
                "aime_number": 1,
                "problem_number": number,
            }
            for number, (problem, answer) in enumerate(INTEGER_PROBLEMS, start=1)
        ],
    )
    write_parquet(
        "amc/data/train-00000-of-00001.parquet",
        [
            {"id": index, "problem": problem, "answer": float(answer)}
            for index, (problem, answer) in enumerate(INTEGER_PROBLEMS)
        ],
    )
    write_json(
        "minerva/minerva.json",
        [
            {"problem": problem, "type": "sample", "idx": index, "answer": answers}
            for index, (problem, answers) in enumerate(SCIENCE)
        ],
    )
    write_json(
        "olympiadbench/olympiad_bench.json",
        [
            {
                "id": index,
                "context": None,
                "is_multiple_answer": several,
                "unit": unit,
                "answer_type": kind,
                "error": error,
                "problem": problem,
                "answer": [answer],
            }
            for index, (problem, answer, several, kind, unit, error) in enumerate(OLYMPIAD)
        ],
    )
    files = sorted(file for suffix in ("json", "jsonl", "parquet") for file in FOLDER.glob(f"**/*.{suffix}"))
    sums = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(FOLDER)}\n" for file in files
    ]
    (FOLDER / "SHA256SUMS").write_text("".join(sums))


if __name__ == "__main__":
    main()
