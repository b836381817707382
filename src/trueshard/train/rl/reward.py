"""The user's reward functions, as training calls them.

``Rewards`` checks them before a model is built, scores samples, and plays episodes: conversations of the model with a
generator function. Functions run in processes of their own, with a time limit a call; what they may return is checked,
and an error names the function, the record, the sample and the line. Rewards depend on the samples alone, not on the
number of processes or on which of them is ready first.

``reward_functions`` has the forms of functions, ``reward_processes`` the processes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trueshard.errors import UserError
from trueshard.train.own_code import Wrong
from trueshard.train.rl.config import RewardSection
from trueshard.train.rl.reward_functions import LISTS, Function, check_signature, form_of, rewards_of
from trueshard.train.rl.reward_processes import Message, Processes
from trueshard.train.rl.samples import Asked, Name, Prompt, Sample, describe

CHECKED = 3
"""Records that ``check`` tries the functions on."""


@dataclass(frozen=True)
class Reward:
    """The reward of a sample."""

    reward: float
    """Sum over the functions of weight × reward; 0.0 if one was too slow."""
    parts: dict[str, float] = field(default_factory=dict)
    """Other numbers that the function returned. With several functions each one's reward under its name, and
    "name.part" for its parts."""
    slow: bool = False
    """True if a call took longer than `reward.seconds`."""


Messages = list[dict[str, Any]]
Turn = Messages | Reward
"""Next turn of an episode: messages, after which it waits for the model's answer, or its end, a reward."""


@dataclass
class _Episode:
    record: Mapping[str, Any]
    about: str
    """The sample, in words."""
    place: int
    """Number of the process in which the generator lives."""
    answers: list[str] = field(default_factory=list)
    """The model's, all of them: where that process had to be ended, another one plays the episode again."""


class Rewards:
    """Reward functions in processes of their own, which start when they are first needed; ``section``: [reward]."""

    def __init__(self, section: RewardSection) -> None:
        self._functions, self._seconds = section.functions, section.seconds
        self._weights = section.weights or [1.0] * len(self._functions)
        if not all(map(math.isfinite, self._weights)):
            raise UserError(f"reward.weights: {self._weights} has a weight that is not finite; give numbers")
        self._labels = _labels(self._functions)
        self._processes = Processes(section.processes, self._functions, section.arguments, section.seconds)
        self._episodes: dict[Name, _Episode] = {}
        """Episodes that wait for an answer of the model, by the name of their sample."""
        self._begun = 0
        """Episodes begun so far: each goes to the next process."""

    @property
    def turns(self) -> bool:
        """True if the reward is an episode: ``begin``, ``answer`` and ``drop`` go with it, and ``score`` does not.

        Loads the functions. Raises `UserError`.
        """
        forms = self._processes.load()
        if "episode" in forms and len(forms) > 1:
            name = self._functions[forms.index("episode")]
            raise UserError(f"reward.function: {name} is an episode, which is the only function; remove the others")
        return forms == ["episode"]

    @property
    def whole(self) -> bool:
        """True if a function takes the list of all samples of a step, so that they must be scored by one call.

        Loads the functions. Raises `UserError`.
        """
        return any(form in LISTS for form in self._processes.load())

    def check(self, records: Sequence[tuple[Mapping[str, Any], str]]) -> None:
        """Load the functions and call them for the first of ``records``, (record, where), with an empty completion.

        Raises:
            UserError: a file or function is missing or cannot be imported, a function raises or returns no reward, or
                takes longer than its limit; of an episode, it does not yield messages first.
        """
        is_episode = self.turns
        asked = [
            (Sample(0, number, 0, []), Prompt(number, [], *record)) for number, record in enumerate(records[:CHECKED])
        ]
        if is_episode:
            slow = [isinstance(turn, Reward) for turn in self.begin(asked)]
            self.drop(sample.name for sample, _ in asked)
        else:
            slow = [reward.slow for reward in self.score(asked)]
        if any(slow):
            where = records[slow.index(True)][1]
            raise UserError(
                f"reward.seconds: {', '.join(self._functions)} took longer than {self._seconds:g} s for {where} and an "
                "empty answer; make it faster, or raise the limit"
            )

    def score(self, asked: Sequence[Asked]) -> list[Reward]:
        """Return the reward of each sample.

        With ``whole``, the samples of one call are the list that such a function gets.

        Raises:
            UserError: a function raises, returns no reward, or ends its process: of the first such sample.
        """
        forms, everything = self._processes.load(), range(len(asked))
        # (function, samples) of each call. Lists first: they take the longest.
        calls = [(number, everything) for number, form in enumerate(forms) if form in LISTS and asked]
        calls += [(n, range(i, i + 1)) for i in everything for n, form in enumerate(forms) if form not in LISTS]
        requests = [
            {"function": number, "inputs": [(asked[i][1].record, vars(asked[i][0])) for i in inputs]}
            for number, inputs in calls
        ]
        about = [[describe(*asked[i]) for i in inputs] for _, inputs in calls]
        rewards: list[list[Any]] = [[None] * len(forms) for _ in asked]  # None: too slow
        for (number, inputs), answer in zip(calls, self._run(requests, about), strict=True):
            if "slow" not in answer:
                for i, reward in zip(inputs, answer["rewards"], strict=True):
                    rewards[i][number] = reward
        return [self._sum(values, describe(*pair)) for values, pair in zip(rewards, asked, strict=True)]

    def begin(self, asked: Sequence[Asked]) -> list[Turn]:
        """Begin the episodes of samples, and return the first turn of each: messages, perhaps none.

        A ``Reward`` instead is slow, and the episode has ended.

        Raises:
            UserError: as ``score``.
        """
        for sample, prompt in asked:
            place = self._begun % len(self._processes)
            self._episodes[sample.name] = _Episode(prompt.record, describe(sample, prompt), place)
            self._begun += 1
        return self._turns([sample.name for sample, _ in asked])

    def answer(self, texts: Mapping[Name, str]) -> dict[Name, Turn]:
        """Give episodes the model's answers; return the next turn of each. One that gives a ``Reward`` has ended.

        Raises:
            UserError: as ``score``.
        """
        for name, text in texts.items():
            self._episodes[name].answers.append(text)
        return dict(zip(texts, self._turns(list(texts)), strict=True))

    def drop(self, names: Iterable[Name]) -> None:
        """Close episodes that get no further answer, such as those without room for one; ignore names of no episode.

        Raises:
            UserError: an episode raises when it is closed.
        """
        dropped = {_key(name): self._episodes.pop(name) for name in names if name in self._episodes}
        self._run_episodes([{"drop": key} for key in dropped], list(dropped.values()))

    def close(self) -> None:
        """End the processes."""
        self._episodes.clear()
        self._processes.close()

    def _turns(self, names: Sequence[Name]) -> list[Turn]:
        episodes = [self._episodes[name] for name in names]
        requests = [
            {"episode": _key(name), "record": episode.record, "answers": episode.answers}
            for name, episode in zip(names, episodes, strict=True)
        ]
        turns: list[Turn] = []
        for name, episode, answer in zip(names, episodes, self._run_episodes(requests, episodes), strict=True):
            if "messages" in answer:
                turns.append(answer["messages"])
            else:
                del self._episodes[name]
                turns.append(self._sum([None if "slow" in answer else answer["rewards"][0]], episode.about))
        return turns

    def _run_episodes(self, requests: Sequence[Message], episodes: Sequence[_Episode]) -> list[Message]:
        return self._run(requests, [[episode.about] for episode in episodes], [episode.place for episode in episodes])

    def _sum(self, rewards: Sequence[tuple[float, dict[str, float]] | None], about: str) -> Reward:
        if None in rewards:
            return Reward(0.0, slow=True)
        values = [reward for reward in rewards if reward is not None]
        weighed = [w * value for w, (value, _) in zip(self._weights, values, strict=True) if not math.isnan(value)]
        if not weighed:
            names = ", ".join(self._functions)
            raise UserError(f"reward.function: {names} returned None for {about}; return a number from one of them")
        total = sum(weighed)
        if len(values) == 1:
            return Reward(total, values[0][1])
        parts: dict[str, float] = {}
        for label, (value, of_function) in zip(self._labels, values, strict=True):
            if math.isnan(value):  # it has no reward for this sample
                continue
            parts |= {label: value, **{f"{label}.{name}": part for name, part in of_function.items()}}
        return Reward(total, parts)

    def _run(
        self,
        requests: Sequence[Message],
        about: Sequence[Sequence[str]],  # of each request, its samples in words
        places: Sequence[int] | None = None,
    ) -> list[Message]:
        """Return the answers to requests. Raises `UserError` with what the first failure says."""
        answers: list[Message] = []
        for request, samples, answer in zip(requests, about, self._processes.run(requests, places), strict=True):
            assert answer is not None, "an earlier request failed, and raises first"
            if "error" in answer:
                at = answer.get("at")
                is_one = at is not None or len(samples) == 1
                which = samples[at or 0] if is_one else f"{len(samples)} samples, from {samples[0]} on"
                function = self._functions[request.get("function", 0)]
                raise UserError(f"reward.function: {function} failed for {which}: {answer['error']}; correct it")
            answers.append(answer)
        return answers


class CalledReward:
    """A reward function that is called in this process, without a time limit: for a loop of one's own."""

    turns = False

    def __init__(self, function: Callable[..., Any]) -> None:
        name = getattr(function, "__name__", type(function).__name__)
        self._function = Function(function, form_of(function, name), {}, None)
        if self._function.form == "episode":
            raise ValueError(f'{name} is an episode, which runs in a process of its own; give "file.py:{name}"')
        try:
            check_signature(function, self._function.form, {}, name)
        except Wrong as error:
            raise ValueError(str(error)) from None
        self._name, self.whole, self._is_new = name, self._function.form in LISTS, True

    def score(self, asked: Sequence[Asked]) -> list[Reward]:
        """Return the reward of each sample. Raises `ValueError` for what is no reward, and what the function raises."""
        result = []
        size = max(1, len(asked)) if self.whole else 1
        for at in range(0, len(asked), size):
            inputs = asked[at : at + size]
            try:
                records = [dict(prompt.record) for _, prompt in inputs]
                value = self._function.on(records, [sample for sample, _ in inputs], is_trial=self._is_new)
                self._is_new = False
                rewards = rewards_of(value, self._function, len(inputs))
                if any(math.isnan(reward) for reward, _ in rewards):
                    raise Wrong("it returned None, not a finite number")
                result += [Reward(*reward) for reward in rewards]
            except Wrong as error:
                raise ValueError(f"{self._name} failed for {describe(*inputs[0])}: {error}") from None
        return result

    def close(self) -> None:
        """Do nothing."""


def _key(name: Name) -> str:
    return "/".join(map(str, name))


def _labels(functions: Sequence[str]) -> list[str]:
    """Return a short name for each function: its own, with its file's where two have the same one."""
    pairs = [(Path(path).stem, name) for path, _, name in (words.rpartition(":") for words in functions)]
    count = Counter(name for _, name in pairs)
    labels = [name if count[name] == 1 else f"{stem}.{name}" for stem, name in pairs]
    if len(set(labels)) < len(labels):
        raise UserError(f"reward.function: {', '.join(functions)}: two have the same name; rename a function or a file")
    return labels
