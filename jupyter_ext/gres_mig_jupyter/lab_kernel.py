"""A kernel of such a server, over its websocket, as a browser speaks to it."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

import websocket

if TYPE_CHECKING:
    from gres_mig_jupyter.lab import Reply, Server

_ANSWER_S = 60.0


class Ran(NamedTuple):
    """What a cell printed, and the name of the error it ended with, if it did."""

    text: str
    error: str


class Kernel:
    """The kernel of that id."""

    def __init__(self, server: Server, kernel_id: str) -> None:
        self.server, self.id = server, kernel_id
        self._channel: websocket.WebSocket | None = None
        self._session = uuid.uuid4().hex

    def run(self, code: str) -> str:
        """What the code printed; it may not fail."""
        ran = self.wait(self.send(code))
        if ran.error:
            raise self.server.fault(f"kernel {self.id} ended with {ran.error}: {ran.text}")
        return ran.text

    def send(self, code: str) -> str:
        """Begin to run code: the message's id, for `wait`."""
        message = uuid.uuid4().hex
        header = {
            "msg_id": message,
            "msg_type": "execute_request",
            "session": self._session,
            "username": "",
            "version": "5.3",
            "date": "2026-01-01T00:00:00Z",
        }
        content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False}
        asked = {"channel": "shell", "header": header, "parent_header": {}, "metadata": {}, "content": content}
        self._connected().send(json.dumps(asked))
        return message

    def wait_for_output(self, message: str) -> None:
        """Until what was begun has printed something."""
        while self._next(message)["msg_type"] != "stream":
            pass

    def wait(self, message: str) -> Ran:
        """How what was begun ended, and what it printed from here on."""
        printed, error, over = "", "", {"execute_reply", "idle"}
        while over:
            said = self._next(message)
            kind, content = said["msg_type"], said["content"]
            if kind == "stream":
                printed += content["text"]
            elif kind == "execute_result":
                printed += content["data"]["text/plain"]
            elif kind == "error":
                error = content["ename"]
            # Output comes on another channel than the reply, in no order to it; `idle` ends it.
            over -= {content["execution_state"] if kind == "status" else kind}
        return Ran(printed.strip(), error)

    def environment(self) -> dict[str, str]:
        """What the kernel's process was given."""
        variables: dict[str, str] = json.loads(self.run("import json, os; print(json.dumps(dict(os.environ)))"))
        return variables

    def pid(self) -> int:
        """Of its process."""
        return int(self.run("import os; print(os.getpid())"))

    def interrupt(self) -> None:
        """As the stop button does."""
        self.server.expect(204, "POST", f"/api/kernels/{self.id}/interrupt")

    def restart(self) -> Reply:
        """As the restart button does; the answer may be a refusal."""
        self.disconnect()
        return self.server.ask("POST", f"/api/kernels/{self.id}/restart")

    def shutdown(self) -> None:
        """For good."""
        self.disconnect()
        self.server.expect(204, "DELETE", f"/api/kernels/{self.id}")

    def disconnect(self) -> None:
        """Close the websocket; the next code that is run opens one again."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _next(self, message: str) -> dict[str, Any]:
        """What the kernel says next in answer to that message."""
        while True:
            said: dict[str, Any] = json.loads(self._connected().recv())
            if said["parent_header"].get("msg_id") == message:
                return said

    def _connected(self) -> websocket.WebSocket:
        if self._channel is None:
            url = f"ws://127.0.0.1:{self.server.port}/api/kernels/{self.id}/channels?session_id={self._session}"
            headers = [f"Authorization: token {self.server.token}"]
            self._channel = websocket.create_connection(url, timeout=_ANSWER_S, header=headers)
        return self._channel
