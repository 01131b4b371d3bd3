"""A real JupyterHub behind a real configurable-http-proxy on loopback, with a configuration that the docs show."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import requests
import websocket
from notebook_server import OTHER_USER, USER, require_user, until
from typing_extensions import Self

from gres_mig.errors import NodeFault
from gres_mig_jupyter.lab import PATIENCE_S, Reply
from gres_mig_jupyter.lab_kernel import Kernel

_ROOT = Path(__file__).parents[1]
_PASSWORD = secrets.token_hex(8)
_EXTENSIONS = {"gres_mig_jupyter": True, "jupyter_lsp": False, "jupyter_server_terminals": False, "jupyterlab": False}
"""Those of other packages cost each start of a server a second or two."""


def require_hub() -> None:
    """Skip where no Hub can be brought up; CI makes that a failure."""
    if os.geteuid() != 0:
        pytest.skip("a Hub whose servers are several users' runs as root", allow_module_level=True)
    if not _proxy().exists():
        pytest.skip("no configurable-http-proxy here; run: .ci/hub-proxy .venv", allow_module_level=True)
    require_user()


def documented(number: int) -> str:
    """The `jupyterhub_config.py` that docs/jupyterhub.md shows as its so-manieth."""
    text = (_ROOT / "docs" / "jupyterhub.md").read_text()
    return re.findall(r"`/etc/jupyterhub/jupyterhub_config.py`:\n\n```python\n(.*?)```", text, re.DOTALL)[number]


class Hub(AbstractContextManager["Hub"]):
    """A Hub, in a folder of its own; a context manager. `conf` is its configuration, `variables` its environment."""

    def __init__(self, conf: str, variables: Mapping[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gres-mig-hub-"))
        self.folder.chmod(0o755)
        self.token = secrets.token_hex(16)
        self.port, self._hub_port, self._api_port = _free_ports(3)
        self._doors = (self._hub_port, self.port)
        self._variables = dict(variables)
        self.process: subprocess.Popen[bytes] | None = None
        (self.folder / "homes").mkdir()
        (self.folder / "homes").chmod(0o1777)
        server = f"c = get_config()\nc.ServerApp.jpserver_extensions = {_EXTENSIONS!r}\n"
        (self.folder / "jupyter_server_config.py").write_text(server)
        # That there is nothing of the Jupyter of before 2015 is to be remembered there, by users who cannot write it.
        (self.folder / "migrated").touch()
        (self.folder / "jupyterhub_config.py").write_text(f"{conf}\n{self._of_this_test()}")

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop_servers()
            self.stop()
        self._end_rest()
        shutil.rmtree(self.folder)

    def start(self) -> None:
        """Start it, or start it again; over once it answers behind its proxy."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyterhub", "--config", "jupyterhub_config.py"],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(self._answers, "the Hub answers", log=self.log)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it by a signal; its servers go on, and after SIGKILL its proxy too."""
        assert self.process is not None
        self.process.send_signal(how)
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def log(self) -> str:
        """Everything that it and its servers said."""
        files = [self.folder / "log", *sorted((self.folder / "homes").glob("*/*.log"))]
        lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
        return "\n".join(line for line in lines if " 200 GET " not in line)

    def api(self, method: str, path: str, body: object = None, *, token: str = "") -> Reply:
        """One request to the Hub's API, as its admin, or as whose token that is."""
        return _asked(self.port, method, f"/hub/api{path}", body, token or self.token)

    def model(self, user: str, server: str = "") -> dict[str, Any]:
        """What the Hub knows of a user's server; empty where there is none."""
        servers: dict[str, dict[str, Any]] = self.api("GET", f"/users/{user}?include_stopped_servers").body["servers"]
        return servers.get(server, {})

    def spawn(self, user: str, options: object = None, server: str = "") -> Notebook:
        """Start a user's server by the API, and wait until it is there."""
        reply = self.api("POST", _path(user, server), options)
        assert reply.code in {201, 202}, f"{reply}\n{self.log()}"
        return self.notebook(user, server)

    def refused(self, user: str, options: object, server: str = "") -> tuple[int, str]:
        """Status and text of a start that has to fail."""
        reply = self.api("POST", _path(user, server), options)
        assert reply.code >= 400, f"{reply}\n{self.log()}"
        return reply.code, reply.body["message"]

    def notebook(self, user: str, server: str = "") -> Notebook:
        """A user's server, once the Hub calls it ready."""
        # The events of its start, which end when it is there, or when it is not to be.
        self.api("GET", f"{_path(user, server)}/progress")
        assert self.model(user, server).get("ready"), f"{self.model(user, server)}\n{self.log()}"
        # An API token of the user's own: the Hub's admin is nobody to a server.
        made = self.api("POST", f"/users/{user}/tokens", {})
        assert made.code == 201, made
        return Notebook(self, user, server, made.body["token"])

    def stop_server(self, user: str, server: str = "") -> None:
        """As the stop button does; over once the Hub says so."""
        reply = self.api("DELETE", _path(user, server))
        assert reply.code in {202, 204}, f"{reply}\n{self.log()}"
        until(lambda: self.model(user, server).get("stopped", True), f"{user}'s server is stopped", log=self.log)

    def stop_servers(self) -> None:
        """All that run."""
        for user in self.api("GET", "/users").body:
            for name in user["servers"]:
                self.stop_server(user["name"], name)

    def browser(self, user: str) -> Browser:
        """A browser in which that user is logged in."""
        return Browser(self, user)

    def _of_this_test(self) -> str:
        """What a test needs beside what the document shows: ports, folders, who may log in."""
        folder = str(self.folder)
        return f"""
import os, pwd, sys
c.JupyterHub.bind_url = "http://127.0.0.1:{self.port}"
c.JupyterHub.hub_ip = "127.0.0.1"
c.JupyterHub.hub_port = {self._hub_port}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{self._api_port}"
c.ConfigurableHTTPProxy.command = [{str(_proxy())!r}]
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": {PATIENCE_S}, "slow_stop_timeout": {PATIENCE_S}}}
c.JupyterHub.db_url = "sqlite:///{folder}/hub.sqlite"
c.JupyterHub.cookie_secret_file = "{folder}/cookie_secret"
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = {_PASSWORD!r}
c.Authenticator.allowed_users = {{{USER!r}, {OTHER_USER!r}}}
c.JupyterHub.services = [{{"name": "test", "api_token": {self.token!r}}}]
c.JupyterHub.load_roles = [
    {{"name": "test", "services": ["test"],
      "scopes": ["admin:users", "admin:servers", "admin:server_state", "tokens", "access:servers"]}},
    {{"name": "user", "scopes": ["self"]}},
]

def _home(spawner):
    # The accounts that every Debian has, have homes that are not theirs.
    account, home = pwd.getpwnam(spawner.user.name), f"{folder}/homes/{{spawner.user.name}}"
    if not os.path.isdir(home):
        os.mkdir(home, 0o755)
        os.chown(home, account.pw_uid, account.pw_gid)
    spawner.notebook_dir = home
    kinds = ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    spawner.environment = {{**spawner.environment, **{{kind: f"{{home}}/{{kind}}" for kind in kinds}}}}
    spawner.environment["JUPYTER_CONFIG_DIR"] = "{folder}"
    spawner.environment["JUPYTERHUB_SINGLEUSER_APP"] = "jupyter-server"
    spawner.environment["PYTHONDONTWRITEBYTECODE"] = "1"
    if hasattr(spawner, "req_homedir"):
        spawner.req_homedir = home

c.Spawner.pre_spawn_hook = _home
"""

    def _environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        return {"PATH": path, "LANG": "C.UTF-8", "HOME": str(self.folder), **self._variables}

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            pytest.fail(f"the Hub ended with {self.process.returncode}\n{self.log()}")
        try:
            # The Hub itself first: its proxy is there before it, and logs every question that it cannot answer yet.
            return {_asked(port, "GET", "/hub/api/users", None, self.token).code for port in self._doors} == {200}
        except ConnectionError:
            return False

    def _end_rest(self) -> None:
        """What a Hub that was killed left running: its proxy and its servers, which know the folder's name."""
        for process in Path("/proc").glob("[0-9]*"):
            # Those that end meanwhile, and pid 1, whose environment is not even root's to read everywhere.
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)


class Notebook:
    """A user's server behind the proxy; `Kernel` speaks to it as to any other."""

    def __init__(self, hub: Hub, user: str, name: str, token: str) -> None:
        self.hub, self.user, self.name, self.token, self.port = hub, user, name, token, hub.port
        self.prefix = f"/user/{user}/{name}".rstrip("/")
        self.pid = int(hub.model(user, name)["state"].get("pid", 0))
        """Of the server, where it is a process of the Hub's machine."""

    def ask(self, method: str, path: str, body: object = None) -> Reply:
        """One request to the server, as its user."""
        return _asked(self.port, method, f"{self.prefix}{path}", body, self.token)

    def expect(self, code: int, method: str, path: str, body: object = None) -> Any:
        """The body of an answer that has to have that status."""
        reply = self.ask(method, path, body)
        if reply.code != code:
            raise self.fault(f"{method} {path} was answered with {reply.code}, not {code}: {reply.body}")
        return reply.body

    def fault(self, what: str) -> NodeFault:
        """What to raise when something of it is not as it has to be."""
        return NodeFault(f"{what}; the Hub and its servers said:\n{self.hub.log()}", code="INTERNAL")

    def kernel(self, spec: str = "python3") -> HubKernel:
        """Start a kernel."""
        return HubKernel(self, self.expect(201, "POST", "/api/kernels", {"name": spec})["id"])

    def kernels(self) -> list[str]:
        """The ids of its kernels."""
        return [each["id"] for each in self.expect(200, "GET", "/api/kernels")]

    def kill(self) -> None:
        """End the server as a crash does."""
        os.kill(self.pid, signal.SIGKILL)


class HubKernel(Kernel):
    """A kernel of a server behind the proxy."""

    server: Notebook  # type: ignore[assignment]

    def __init__(self, server: Notebook, kernel_id: str) -> None:
        super().__init__(server, kernel_id)  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    def _connected(self) -> websocket.WebSocket:
        if self._channel is None:
            path = f"{self.server.prefix}/api/kernels/{self.id}/channels?session_id={self._session}"
            self._channel = websocket.create_connection(
                f"ws://127.0.0.1:{self.server.port}{path}",
                timeout=PATIENCE_S,
                header=[f"Authorization: token {self.server.token}"],
            )
        return self._channel


class Browser:
    """Cookies and forms, as a person has them before a Hub."""

    def __init__(self, hub: Hub, user: str) -> None:
        self._hub, self._user, self._session = hub, user, requests.Session()
        self._url = f"http://127.0.0.1:{hub.port}"
        self._get("/hub/login")
        data = {"username": user, "password": _PASSWORD, "_xsrf": self._xsrf()}
        answer = self._session.post(f"{self._url}/hub/login", data=data, timeout=PATIENCE_S, allow_redirects=False)
        assert answer.status_code == 302, answer.text

    def form(self, server: str = "") -> Form:
        """The page on which options are chosen."""
        return Form(self._get(f"/hub/spawn/{self._user}/{server}".rstrip("/")).text)

    def submit(self, **fields: str) -> requests.Response:
        """Send the form; the answer is a page, or where to wait for the server."""
        return self._session.post(
            f"{self._url}/hub/spawn?_xsrf={self._xsrf()}", data=fields, timeout=PATIENCE_S, allow_redirects=False
        )

    def _get(self, path: str) -> requests.Response:
        answer = self._session.get(f"{self._url}{path}", timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer

    def _xsrf(self) -> str:
        return self._session.cookies.get("_xsrf", path="/hub/", default="") or ""


class Form(HTMLParser):
    """A page's fields as a person, or a screen reader, has them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.options: dict[str, dict[str, str]] = {}
        """By field, what each value is shown as."""
        self.chosen: dict[str, str] = {}
        self.labels: dict[str, str] = {}
        """By field."""
        self.described: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        self._within: Callable[[str], None] = lambda _: None
        self._select = ""
        self.feed(text)

    def explanation(self, field: str) -> str:
        """What a screen reader adds to the label."""
        return self._ids[self.described[field]]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Remember what text belongs to."""
        given = {name: value or "" for name, value in attrs}
        if tag == "select":
            self._select = given["name"]
            self.options[self._select] = {}
            self.described[self._select] = given.get("aria-describedby", "")
        elif tag == "option" and self._select:
            field, value = self._select, given.get("value", "")
            if "selected" in given or not self.options[field]:
                self.chosen[field] = value
            self._within = lambda text: self.options[field].__setitem__(value, text)
        elif tag == "label":
            # By id, which our fields have as their name.
            self._within = lambda text: self.labels.__setitem__(given.get("for", ""), text)
        elif "id" in given:
            self._within = lambda text: self._ids.__setitem__(given["id"], text)

    def handle_endtag(self, tag: str) -> None:
        """Text after it belongs to nothing."""
        self._within = lambda _: None

    def handle_data(self, data: str) -> None:
        """Text of what was opened last."""
        self._within(data)


def _path(user: str, server: str) -> str:
    return f"/users/{user}/servers/{server}" if server else f"/users/{user}/server"


def _asked(port: int, method: str, path: str, body: object, token: str) -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        given = None if body is None else json.dumps(body)
        connection.request(method, path, given, {"Authorization": f"token {token}"})
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    if answer.headers.get_content_type() == "application/json":
        return Reply(answer.status, json.loads(text) if text else None)
    return Reply(answer.status, text or None)


def _proxy() -> Path:
    """Where `.ci/hub-proxy` put it: into the environment that runs the tests, or into that of `make test`."""
    program = Path("hub-proxy", "node_modules", ".bin", "configurable-http-proxy")
    places = [place / program for place in (Path(sys.prefix), _ROOT / ".venv")]
    return next((place for place in places if place.exists()), places[0])


def _free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in taken]
    for each in taken:
        each.close()
    return ports
