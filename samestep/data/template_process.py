"""Renders chat templates, small programs of others, in a process whose time, memory and output are limited.

A template can ask for a gigabyte of text in one call of C, which nothing in the same process interrupts. So a forked process
renders. The kernel counts its processor time, however busy the machine is, ends it when that is spent, and refuses it memory
beyond its limit (where a process's address space can be limited: on Linux).
"""

import atexit
import collections
import contextlib
import gc
import json
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2

from samestep._internals.chat_rendering import render_turns
from samestep.errors import UsageError, reason

MEMORY = 3 * 2**28  # bytes beyond those that the process begins with
CHARACTERS, CHARACTERS_PER_BYTE = 2**20, 64  # of a rendered text; and more for each byte of a conversation
REMEDY = "mend it, or give another template, --chat_template FILE"
BUFFER = 2**16  # bytes of answers that are sent at once, about


class TemplateRefusal(Exception):
    """A template that does not render a conversation; the message says why.

    Attributes:
        is_syntax: whether it renders none, because it is not Jinja.
    """

    def __init__(self, message: str, is_syntax: bool = False):
        super().__init__(message)
        self.is_syntax = is_syntax


class TemplateLimitError(UsageError):
    """A template that takes more than is allowed. The message has no subject: "takes more than ...", and the remedy."""


class Times(NamedTuple):
    """The processor time, in seconds, that renderings may take.

    Attributes:
        most: of one.
        average: of one among many.
        per_byte: more of each, for every byte of its conversation.
    """

    most: float = 1.0
    average: float = 0.02
    per_byte: float = 1e-6


class Part(NamedTuple):
    """A part of a conversation that is rendered.

    Attributes:
        num_turns: of its beginning.
        begins_answer: whether the beginning of an answer follows (`add_generation_prompt`).
    """

    num_turns: int
    begins_answer: bool = False


class Request(NamedTuple):
    """A conversation to render.

    Attributes:
        template: in Jinja.
        special_tokens: of the tokenizer: "eos_token" and so on -> text.
        turns, tools: of the conversation.
        parts: of the conversation.
        has_markers: whether the template has markers, whose spans are found.
        now: time that the template reads from the clock, in ISO's format.
    """

    template: str
    special_tokens: Mapping[str, str]
    turns: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    parts: Sequence[Part]
    has_markers: bool = False
    now: str = "1970-01-01"


class Rendering(NamedTuple):
    """A rendered text.

    Attributes:
        text: the whole of it.
        spans: [first character, the one after the last] of what each of the template's markers holds; without markers
            [first, last, number of the turn] of what loops over turns write.
    """

    text: str
    spans: list[list[int]]


class TemplateProcess:
    """The process that renders: started for the first conversation, again after its end, and anew in a forked process.

    Args:
        times: that renderings may take.
    """

    def __init__(self, times: Times = Times()) -> None:  # noqa: B008 - a tuple
        self.times = times
        self.owner = self.pid = 0  # process that started it, and its own number; 0: there is none
        self.pipes: list[Connection] = []  # for requests, for answers
        self.asked: list[Request] = []  # without an answer so far
        self.answers: collections.deque[tuple[Request, list[dict[str, Any]]]] = collections.deque()
        self.end = ""  # why the last one has ended

    def ask(self, requests: Sequence[Request]) -> None:
        """Ask for renderings of conversations, some or all of which `take` will take, in this order."""
        if not requests:
            return
        while self.asked and self.owner == os.getpid():  # by a caller that has refused the conversation half-way
            self._receive()
        if self.owner != os.getpid():
            self._start()
        content, setup = [], None
        for request in requests:
            own_setup = request.template, request.special_tokens, request.now
            told = None if own_setup == setup else own_setup
            content.append(_encode([told, request.turns, request.tools, request.parts, request.has_markers]))
            setup = own_setup
        self.answers.clear()
        self.asked = list(requests)
        with contextlib.suppress(OSError):  # the process has ended: who takes will see it
            self.pipes[0].send_bytes(b"\n".join(content))  # one message: it is read before there is any answer

    def take(self, request: Request) -> Iterator[Rendering]:
        """Render the parts of a conversation as `apply_chat_template` does.

        Yields:
            The rendering of each part, which waits for nothing if it was asked for.

        Raises:
            TemplateRefusal: the template does not render a part.
            TemplateLimitError: the template takes too much.
        """
        answers = self._find_answers(request)
        if answers is None:  # it was not asked for, or another conversation beside it has ended the process
            self.ask([request])
            answers = self._find_answers(request)
        if answers is None:
            raise TemplateLimitError(f"{self.end}: {REMEDY}")
        for answer in answers:
            if "limit" in answer:
                self.close()
                raise TemplateLimitError(f"{answer['limit']}: {REMEDY}")
            if "refusal" in answer:
                raise TemplateRefusal(answer["refusal"], answer["is_syntax"])
            yield Rendering(answer["text"], answer["spans"])

    def _find_answers(self, request: Request) -> list[dict[str, Any]] | None:
        """Find the answers to a request, and drop those before; None: it was not asked for, or the process has ended."""
        while self.owner == os.getpid():
            while self.answers:
                asked, answers = self.answers.popleft()
                if asked == request:
                    return answers
            if not self.asked:
                break
            self._receive()
        return None

    def _receive(self) -> None:
        """Receive the next answers, or note why the process has ended."""
        try:
            lines = self.pipes[1].recv_bytes().split(b"\n")
        except (EOFError, OSError):
            self.end = self._explain_end()
            return
        self.answers += zip(self.asked, map(_decode, lines), strict=False)
        del self.asked[: len(lines)]

    def close(self) -> None:
        """End the process. The next conversation starts another one."""
        if self.owner == os.getpid():
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        for pipe in self.pipes:
            pipe.close()
        self.owner, self.pipes, self.asked = 0, [], []
        self.answers.clear()

    def _start(self) -> None:
        self.close()  # pipes of the process that this one was forked from
        read_requests, write_requests = Pipe(duplex=False)
        read_answers, write_answers = Pipe(duplex=False)
        with warnings.catch_warnings():
            # Python warns of threads, but the forked process calls nothing of theirs
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            _become_renderer(read_requests.fileno(), write_answers.fileno(), self.times)
        read_requests.close()
        write_answers.close()
        self.pipes = [write_requests, read_answers]
        self.owner, self.pid = os.getpid(), pid

    def _explain_end(self) -> str:
        """Say why the process has ended, and forget it."""
        _, status = os.waitpid(self.pid, 0)
        self.owner = 0  # nobody is to be killed
        self.close()
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGPROF:
            return f"takes more than {self.times.most:g} s of processor time for a conversation"
        if code == -signal.SIGKILL:
            return "has its process killed while it renders a conversation, perhaps for its memory"
        return f"ends the process that renders it (exit code {code})"


PROCESS = TemplateProcess()
"""The process for all templates of this one."""
atexit.register(PROCESS.close)


def _become_renderer(requests: int, answers: int, times: Times) -> NoReturn:
    """Serve requests until the other end is closed. Nothing of the forked process but its code and these pipes is used."""
    code = 1
    try:
        gc.freeze()  # objects of the other process, whose finalizers are its own
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which end the other process, and so this one
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor, target in ((requests, 0), (answers, 1), (null, 2)):
            os.dup2(descriptor, target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # sockets and locks of the other process
        _limit_memory()
        _serve(Connection(0, writable=False), Connection(1, readable=False), times)
        code = 0
    finally:
        os._exit(code)


def _limit_memory() -> None:
    if sys.platform == "linux":
        size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize() + MEMORY
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([size, *limits]), hard))


def _serve(incoming: Connection, outgoing: Connection, times: Times) -> None:
    left = times.most
    while True:
        try:
            message = incoming.recv_bytes()
        except EOFError:
            return
        lines: list[bytes] = []
        setup: Any = None
        for request in message.split(b"\n"):
            told, turns, tools, parts, has_markers = _decode(request)
            setup = told or setup
            template, special_tokens, now = setup
            answers, size = [], len(request)
            for num_turns, begins_answer in parts:
                variables = special_tokens | {"add_generation_prompt": begins_answer}
                begin, more = time.process_time(), times.per_byte * size
                signal.setitimer(signal.ITIMER_PROF, times.most + more)  # whose signal ends this process
                answers.append(_render(template, variables, now, turns[:num_turns], tools, has_markers, size))
                signal.setitimer(signal.ITIMER_PROF, 0)
                left += times.average + more + begin - time.process_time()
                if left < 0:
                    answers[-1] = {"limit": f"takes more than {times.average:g} s of processor time on average"}
                    break
            lines.append(_encode(answers))
            if left < 0 or sum(map(len, lines)) > BUFFER:  # not each: one wake-up of the other process for several
                outgoing.send_bytes(b"\n".join(lines))
                lines.clear()
        if lines:
            outgoing.send_bytes(b"\n".join(lines))


def _render(
    template: str,
    variables: dict[str, Any],
    now: str,
    turns: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    has_markers: bool,
    size: int,
) -> dict[str, Any]:
    """Render a conversation of a size in bytes; return the answer."""
    try:
        if not turns:
            raise ValueError("a conversation without a turn")
        text, spans = render_turns(template, turns, tools, now, has_markers, variables)
        largest = CHARACTERS + CHARACTERS_PER_BYTE * size
        if len(text) > largest:
            return {"limit": f"makes more than {largest:,} characters of a conversation of {size:,} bytes"}
        return {"text": text, "spans": spans}
    except MemoryError:
        return {"limit": f"takes more than {MEMORY / 2**20:.0f} MiB of memory for a conversation"}
    except Exception as error:  # of any kind: others wrote the template
        return {"refusal": reason(error), "is_syntax": isinstance(error, jinja2.TemplateSyntaxError)}


def _encode(content: Any) -> bytes:
    """Write a message, or a part of one, as JSON in a line."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _decode(message: bytes) -> Any:
    return json.loads(message.decode("utf-8", "surrogatepass"))
