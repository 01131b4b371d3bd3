"""A Jupyter server brought up on loopback for a demo, a benchmark or a test, and taken down again."""

from __future__ import annotations

import http.client
import json
import os
import pty
import pwd
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gres_mig.errors import NodeFault
from gres_mig_jupyter.lab_kernel import Kernel

if TYPE_CHECKING:
    from typing_extensions import Self

PATIENCE_S = 60.0
"""How long anything may take on a busy machine; nothing waits that long for nothing."""

_LINES = 80
_OTHERS = ("jupyter_lsp", "jupyter_server_terminals", "jupyterlab", "nbclassic", "notebook", "notebook_shim")
"""Server extensions that other packages switch on, and that cost each start of a server a second or two."""


class Reply(NamedTuple):
    """What a server answered."""

    code: int
    body: Any
    """Parsed where it is JSON, else text; None where it is empty."""


class Server:
    """A `jupyter_server` with files of its own in `folder` and no setting of its caller's.

    `node` is the simulated node's folder. `user` is the account it runs as, `tty` gives it a terminal as its standard
    input, `conf` is added to its jupyter_server_config.py, `variables` to its environment, and `specs` are kernel specs
    by name: `gpu_spec`.
    """

    def __init__(
        self,
        folder: Path,
        node: Path | str,
        *,
        user: str = "",
        tty: bool = False,
        conf: str = "",
        variables: Mapping[str, str] | None = None,
        specs: Mapping[str, Mapping[str, Any]] | None = None,
        extension: bool = True,
    ) -> None:
        self.folder, self.user, self.token = folder, user, secrets.token_hex(16)
        self._node, self._tty, self._conf, self._extension = str(node), tty, conf, extension
        self._variables = dict(variables or {})
        self._terminal = -1
        self._opened: list[Kernel] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0
        for name in ("config", "data", "runtime", "home", "notebooks"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name, spec in (specs or {}).items():
            self.add_spec(name, spec)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the server itself."""
        assert self.process is not None
        return self.process.pid

    def add_spec(self, name: str, spec: Mapping[str, Any]) -> None:
        """Install a kernel spec in this server's own data folder."""
        place = self.folder / "data" / "kernels" / name
        place.mkdir(parents=True, exist_ok=True)
        (place / "kernel.json").write_text(json.dumps(spec))

    def start(self) -> None:
        """Start it, or start it again in the same folder; over once it answers."""
        (self.folder / "config" / "jupyter_server_config.py").write_text(self._configuration())
        if self.user:
            give(self.folder, self.user)
        stdin = subprocess.DEVNULL
        if self._tty:
            self._terminal, stdin = pty.openpty()
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                # As from a terminal, also where this runs under nohup.
                [*acting_as(self.user), "env", "--default-signal=HUP", sys.executable, "-m", "jupyter_server"],
                cwd=self.folder,
                env=self.environment(),
                stdin=stdin,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if self._tty:
            os.close(stdin)
        self.until(self._answers, "the server answers")

    def stop(self, how: signal.Signals = signal.SIGTERM, *, within: float = PATIENCE_S) -> int:
        """Send it a signal and wait for its end: its exit code."""
        assert self.process is not None
        self.process.send_signal(how)
        return self.ended(within=within)

    def ended(self, *, within: float = PATIENCE_S) -> int:
        """Its exit code, once it has ended."""
        assert self.process is not None
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise self.fault(f"the server did not end within {within:g} s") from None

    def close(self) -> None:
        """End it, however it is."""
        for kernel in self._opened:
            kernel.disconnect()
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S / 4)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._terminal >= 0:
            os.close(self._terminal)
            self._terminal = -1

    def type(self, text: str) -> None:
        """On its terminal."""
        os.write(self._terminal, text.encode())

    def log(self) -> str:
        """Everything it said, also before it was started again."""
        return (self.folder / "log").read_text(errors="replace")

    def fault(self, what: str) -> NodeFault:
        """What to raise when something of it is not as it has to be."""
        last = "\n".join(self.log().splitlines()[-_LINES:])
        return NodeFault(f"{what}; the last that the server said:\n{last}", code="INTERNAL")

    def until(self, true: Callable[[], object], what: str, *, within: float = PATIENCE_S) -> None:
        """Look until it is so; no event tells of what another process does."""
        ends = time.monotonic() + within
        while not true():
            if time.monotonic() > ends:
                raise self.fault(f"not within {within:g} s: {what}")
            time.sleep(0.01)

    def ask(self, method: str, path: str, body: object = None, *, token: str | None = None, **headers: str) -> Reply:
        """One request; an empty `token` sends no credentials."""
        token = self.token if token is None else token
        if token:
            headers["Authorization"] = f"token {token}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.headers.get_content_type() == "application/json":
            return Reply(answer.status, json.loads(text) if text else None)
        return Reply(answer.status, text or None)

    def expect(self, code: int, method: str, path: str, body: object = None) -> Any:
        """The body of an answer that has to have that status."""
        reply = self.ask(method, path, body)
        if reply.code != code:
            raise self.fault(f"{method} {path} was answered with {reply.code}, not {code}: {reply.body}")
        return reply.body

    def get(self, path: str) -> Any:
        """The body of a GET that has to succeed."""
        return self.expect(200, "GET", path)

    def kernel(self, spec: str) -> Kernel:
        """Start a kernel; over once the server says that it is started."""
        return self.known(self.expect(201, "POST", "/api/kernels", {"name": spec})["id"])

    def session(self, spec: str, path: str = "a.ipynb") -> tuple[str, Kernel]:
        """Start a kernel as Lab does, for a notebook: the session's id, and the kernel."""
        asked = {"path": path, "name": path, "type": "notebook", "kernel": {"name": spec}}
        made = self.expect(201, "POST", "/api/sessions", asked)
        return made["id"], self.known(made["kernel"]["id"])

    def known(self, kernel_id: str) -> Kernel:
        """A kernel that runs, by its id."""
        self._opened.append(Kernel(self, kernel_id))
        return self._opened[-1]

    def kernels(self) -> list[str]:
        """The ids of the kernels it lists."""
        return [each["id"] for each in self.get("/api/kernels")]

    def environment(self) -> dict[str, str]:
        """What it runs with: nothing of the caller's, who may be in a Jupyter or in a job himself."""
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": str(self.folder / "home"),
            "IPYTHONDIR": str(self.folder / "home" / "ipython"),
            "JUPYTER_CONFIG_DIR": str(self.folder / "config"),
            "JUPYTER_DATA_DIR": str(self.folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(self.folder / "runtime"),
            "GRES_MIG_NODE": self._node,
            **self._variables,
        }

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise self.fault(f"the server ended with {self.process.returncode}")
        try:
            self.port = json.loads((self.folder / "runtime" / f"jpserver-{self.pid}.json").read_text())["port"]
            return self.ask("GET", "/api/status").code == 200
        except (FileNotFoundError, json.JSONDecodeError, ConnectionError):
            return False

    def _configuration(self) -> str:
        wanted = {**dict.fromkeys(_OTHERS, False), "gres_mig_jupyter": self._extension}
        lines = [
            "c = get_config()",
            f"c.ServerApp.jpserver_extensions = {wanted!r}",
            "c.ServerApp.ip = '127.0.0.1'",
            "c.ServerApp.port = 0",
            "c.ServerApp.open_browser = False",
            "c.ServerApp.allow_root = True",
            f"c.ServerApp.root_dir = {str(self.folder / 'notebooks')!r}",
            f"c.IdentityProvider.token = {self.token!r}",
        ]
        return "\n".join([*lines, self._conf, ""])


def gpu_spec(
    memory: int | str | None = 8000, *, profile: str = "", argv: Sequence[str] = (), name: str = "", **metadata: Any
) -> dict[str, Any]:
    """A kernel spec that asks for GPU memory; a Python kernel, or another command."""
    asks = {"profile": profile} if profile else ({} if memory is None else {"memory": memory})
    return {
        "argv": list(argv) or [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": name or f"Python 3 · GPU {profile or memory}",
        "language": "python",
        "metadata": {"kernel_provisioner": {"provisioner_name": "gres-mig", "config": asks}, **metadata},
    }


def acting_as(user: str) -> list[str]:
    """What to put before a command to run it as that account; nothing for one's own."""
    if not user:
        return []
    return ["setpriv", f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups", "--"]


def give(folder: Path, user: str) -> None:
    """Make a folder and all that is in it that account's."""
    account = pwd.getpwnam(user)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)
