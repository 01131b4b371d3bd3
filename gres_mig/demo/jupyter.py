"""The main job in a real Jupyter server, brought up on loopback for this and taken down again."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gres_mig.demo.story import Story
from gres_mig.show import Paper
from gres_mig.simulator.admin import Node

if TYPE_CHECKING:
    from gres_mig_jupyter.lab import Server
    from gres_mig_jupyter.lab_kernel import Kernel

_NEEDS = ("jupyter_server", "ipykernel", "websocket")
_SMALL, _LARGE = "python3-gpu-8g", "python3-gpu-40g"


def left_out() -> str:
    """Why no Jupyter server can be brought up, with what to type; empty where it can."""
    absent = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    return f"there is no {', '.join(absent)} here; type in a clone of gres-mig: pip install '.[demo]'" if absent else ""


class JupyterDemo(Story):
    """The story in one server, whose files and whose node's are in that folder; its chapters follow on that one."""

    def __init__(self, folder: str, say: Callable[[str], None], paper: Paper, chapter: int) -> None:
        super().__init__(say, paper, chapter)
        self._folder, self._there = str(Path(folder, "node")), Path(folder, "server")

    def tell(self) -> None:
        """All of it; `NodeFault` as soon as something is not as told."""
        from gres_mig_jupyter.lab import Server

        self._head("A notebook server")
        self._text(
            "A Jupyter server runs on loopback, on one simulated GPU that is its user's own. A kernel spec says how "
            "much GPU memory a kernel of it asks for; nothing else of a notebook changes."
        )
        self._run("simulate", "create", self._folder, "--board", "rtx-pro-6000", quiet=True)
        self._node = Node(self._folder)
        prefix = str(self._there.parent / "prefix")
        said = self._run(
            "kernelspec", "install", "--memory", "8G", "--memory", "40G", "--prefix", prefix, node=self._folder
        )
        self._check(said.count("· GPU ") == 2, "two kernels with GPU memory are in its launcher")
        self._echo("jupyter server")
        with Server(self._there, self._folder, variables={"JUPYTER_PATH": f"{prefix}/share/jupyter"}) as server:
            self._check(not self._node.instances(), "the server alone holds nothing")
            small, large = self._start_two(server)
            self._restart(large)
            self._refuse(server, [small, large])
            self._shut_down(server, small)
            self._head("The server is told to end")
            self._echo("kill", str(server.pid))
            server.stop()
        self._check(not self._node.instances(), "its kernels are gone, and no instance is left")

    def _start_two(self, server: Server) -> tuple[Kernel, Kernel]:
        self._head("Two kernels of different size")
        small, large = (self._start(server, name) for name in (_SMALL, _LARGE))
        profiles = sorted(i.profile for i in self._node.instances())
        self._check(profiles == ["1g.24gb", "2g.48gb"], "each has an instance of its own, made as it started")
        self._map(self._folder)
        return small, large

    def _start(self, server: Server, spec: str) -> Kernel:
        self._echo(f"POST /api/kernels {spec}")
        kernel = server.kernel(spec)
        self._quote("in the kernel, gres_mig.current():")
        self._quote(kernel.run("import gres_mig; print(gres_mig.current())"))
        told = _uuid(kernel)
        self._check(
            sum(told in i.mig_uuids for i in self._node.instances()) == 1, "its CUDA_VISIBLE_DEVICES", quiet=True
        )
        return kernel

    def _restart(self, kernel: Kernel) -> None:
        self._head("A kernel is restarted")
        before = (_uuid(kernel), self._node.instances())
        pid = kernel.pid()
        self._echo("POST /api/kernels/…/restart")
        kernel.restart()
        self._check(kernel.pid() != pid, "it is another process", quiet=True)
        self._check((_uuid(kernel), self._node.instances()) == before, "it is on the very same instance")

    def _refuse(self, server: Server, kernels: list[Kernel]) -> None:
        self._head("One too many")
        before = self._node.instances()
        self._echo(f"POST /api/kernels {_LARGE}")
        reply = server.ask("POST", "/api/kernels", {"name": _LARGE})
        self._check(reply.code == 503, "it is refused", quiet=True)
        self._quote(reply.body["message"])
        self._check(self._node.instances() == before, "nothing was made or destroyed for it")
        self._check(all(kernel.run("1 + 1") == "2" for kernel in kernels), "the other two work on")

    def _shut_down(self, server: Server, kernel: Kernel) -> None:
        self._head("A kernel is shut down")
        self._echo("DELETE /api/kernels/…")
        kernel.shutdown()
        self._check([i.profile for i in self._node.instances()] == ["2g.48gb"], "its instance is given back")
        self._start(server, _SMALL)
        self._map(self._folder)


def _uuid(kernel: Kernel) -> str:
    return kernel.environment()["CUDA_VISIBLE_DEVICES"]
