"""Starts a kernel on this machine with a MIG instance of its own, and gives it back when the kernel has ended."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from traitlets import Any as AnyTrait
from traitlets import Unicode

from gres_mig.answers import added
from gres_mig.errors import BadRequest, Fault, GresMigError
from gres_mig.sizes import parse_memory
from gres_mig_jupyter.node import Node, this_server

KEYS = ("memory", "profile")
"""What a kernel spec may say in `metadata.kernel_provisioner.config`."""

_CLEANUP_S = 3.0
_END_S = 2.0
_NOTHING_BEGUN = frozenset({"CONFIG", "NOPERM", "STATE"})
"""A node that is not set up, a socket that is not the service's, a service that is not there, records that are not."""
_CLAIMS = ("CUDA_", "NVIDIA_", "GRES_MIG_")


class MigProvisioner(LocalProvisioner):
    """A local kernel with GPU memory: the kernel spec says how much, this server's configuration what others get."""

    memory = AnyTrait(
        "", help="GPU memory of kernels whose spec names none: MiB, or with a unit, such as 8000 or '8G'."
    ).tag(config=True)
    profile = AnyTrait("", help="A profile for them by its name instead, such as '1g.24gb'.").tag(config=True)
    node_config = Unicode(
        "", help="The node's config.toml, where it is not /etc/gres-mig/config.toml; GRES_MIG_CONFIG says the same."
    ).tag(config=True)

    _on: Node | None = None
    """Where something may be held for this kernel."""
    _restarts = False
    _notebook = ""
    _ending: asyncio.Task[None] | None = None

    def __init__(self, *, kernel_spec: Any = None, **traits: Any) -> None:
        """A kernel spec's `config` comes as traits: what it may not say sets nothing, and is refused at the start."""
        kept = {name: value for name, value in traits.items() if name in KEYS or name not in _stated(kernel_spec)}
        super().__init__(kernel_spec=kernel_spec, **kept)

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Get the kernel its instance, the very same one at a restart, and tell the kernel of it."""
        # A copy, and a clean one: the caller keeps his, which he may use again for a restart or another kernel.
        env = _without_claims(kwargs.get("env", os.environ))
        self._notebook = env.get("JPY_SESSION_NAME", "")
        node = this_server(self.node_config)
        self._restarts = self._on is not None
        try:
            given = await self._given(node)
            kwargs = await super().pre_launch(**{**kwargs, "env": env})
            # After the kernel spec's own variables.
            kwargs["env"] = added(given["environment"], kwargs["env"])
        except GresMigError as error:
            # A refused ask leaves nothing, nor does one that never got there; another failure may have begun something.
            if self._restarts or (error.fault is Fault.NODE and error.code not in _NOTHING_BEGUN):
                await self._give_back()
            else:
                self._forget()
            refused = await node.refused(self.kernel_id, error, self._notebook)
            self.log.warning("kernel %.60r gets no GPU memory: %s", self.kernel_id, refused.text)
            # Jupyter logs all that led to it, twice; where nothing is wrong the sentence says enough.
            raise refused from (error if error.fault is Fault.NODE else None)
        except BaseException:
            await self._give_back()
            raise
        return kwargs

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the process, and tell the node that the instance lives by it."""
        node = self._on
        assert node is not None
        try:
            connection = await super().launch_kernel(cmd, **kwargs)
            await self._report(node)
        except GresMigError as error:
            await self._abandon()
            raise await node.refused(self.kernel_id, error) from error
        except BaseException:
            await self._abandon()
            raise
        return connection

    async def post_launch(self, **kwargs: Any) -> None:
        """Hear of it when the server gives up restarting a kernel: `cleanup` is never called then."""
        try:
            await super().post_launch(**kwargs)
            if self.parent is not None:
                self.parent.remove_restart_callback(self._given_up, "dead")
                self.parent.add_restart_callback(self._given_up, "dead")
        except BaseException:
            if self.parent is not None:
                # It runs already, and would start again what is ended here (jupyter_client 8.10).
                self.parent.stop_restarter()
            await self._abandon()
            raise
        if self._on is not None:
            self._on.starting.discard(self.kernel_id)

    async def cleanup(self, restart: bool = False) -> None:
        """Give the instance back; a restart keeps it. Only this `restart` is to be trusted, not that of `kill`."""
        # Ports are cached before there is a connection to name them, where a start ended in between.
        if self.connection_info:
            await super().cleanup(restart=restart)
        if not restart:
            await self._give_back()

    async def _given(self, node: Node) -> dict[str, Any]:
        memory, profile = self._request(node)
        if self._ending is not None and self._ending.get_loop() is asyncio.get_running_loop():
            # What a given-up kernel had is on its way back: not to be overtaken, or it would take the new one along.
            await asyncio.wait({self._ending})
        self._on = node
        node.starting.add(self.kernel_id)
        node.notebooks[self.kernel_id] = self._notebook
        try:
            return await node.allocate(self.kernel_id, memory=memory, profile=profile)
        except GresMigError:
            kept = await self._kept(node) if self._restarts else None
            if kept is None or kept["state"] != "allocated":
                raise
            # A restart needs nothing new: neither a GPU that answers nor one that takes new work.
            self.log.warning("kernel %s keeps its instance, which could not be looked at now", self.kernel_id)
            return kept

    async def _kept(self, node: Node) -> dict[str, Any] | None:
        try:
            return await node.kernel(self.kernel_id)
        except GresMigError:
            # While the service is away nobody takes it: the instance lives by this server as well.
            return node.held.get(self.kernel_id)

    async def _report(self, node: Node) -> None:
        assert self.pid is not None
        try:
            await node.report(self.kernel_id, self.pid, later=self._restarts)
        except BadRequest:
            # A kernel that ended at once cannot be reported; it is the server's to start it again or to give up.
            if await self.poll() is None:
                raise

    async def _abandon(self) -> None:
        """End what a failed start left running, and give its instance back: nobody else will."""
        await self.kill()
        try:
            await asyncio.wait_for(self.wait(), _END_S)
        except asyncio.TimeoutError:
            self.log.warning("kernel %s does not end; its instance is given back when it does", self.kernel_id)
        await self._give_back()

    async def _give_back(self) -> None:
        """Within a bound: a server that ends waits for all its kernels; what takes longer goes on meanwhile."""
        node = self._on
        if node is None:
            return
        node.starting.discard(self.kernel_id)
        ending = asyncio.ensure_future(self._reclaimed(node))
        # A task that nothing refers to may be collected half way.
        self._ending = ending
        done, _ = await asyncio.wait({ending}, timeout=_CLEANUP_S)
        if not done:
            self.log.warning("giving back the instance of kernel %s goes on in the background", self.kernel_id)

    async def _reclaimed(self, node: Node) -> None:
        try:
            await node.reclaim(self.kernel_id)
            self._on = None
        except GresMigError as error:
            self.log.warning("giving back the instance of kernel %s: %s", self.kernel_id, error)

    def _forget(self) -> None:
        if self._on is not None:
            self._on.forget(self.kernel_id)
            self._on = None

    def _given_up(self) -> None:
        self._ending = asyncio.ensure_future(self._give_back())

    def _request(self, node: Node) -> tuple[str, str]:
        """Memory in MiB, or a profile, as the spec says, else the server's configuration, else its environment."""
        stated = _stated(self.kernel_spec)
        for key in stated:
            if key not in KEYS:
                raise BadRequest(f"the kernel spec's provisioner config says {key!r:.60}: no such key", hint=_ACCEPTED)
        memory, profile = stated.get("memory", ""), stated.get("profile", "")
        if not stated:
            memory, profile = self.memory, self.profile
            if not memory and not profile:
                memory = os.environ.get("GRES_MIG_SERVER_MEMORY", "")
        if memory and profile:
            raise BadRequest("this kernel asks for a memory size and for a profile, and can have one", hint=_ACCEPTED)
        if profile:
            if not isinstance(profile, str) or not re.fullmatch(r"[!-~]{1,64}", profile):
                raise BadRequest(f"profile {profile!r:.60} is no profile's name, such as 1g.24gb")
            return "", profile
        if memory == "" and (node.way == "job" or node.share == "server"):
            return "", ""
        if isinstance(memory, bool) or not isinstance(memory, (int, str)):
            raise BadRequest(f"memory {memory!r:.60} is no size, such as 8000 or 8G")
        if memory == "":
            raise BadRequest("this kernel does not say how much GPU memory it wants", hint=_ACCEPTED)
        return str(parse_memory(str(memory))), ""


_ACCEPTED = 'a kernel spec names one of memory, such as "8G", and profile, such as "1g.24gb"'


def _stated(kernel_spec: Any) -> Mapping[str, Any]:
    """What a kernel spec says to its provisioner."""
    stanza = kernel_spec.metadata.get("kernel_provisioner", {}) if kernel_spec else {}
    config = stanza.get("config", {})
    return config if isinstance(config, Mapping) else {}


def _without_claims(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables without what a client says of GPUs: of those, the server's own count."""
    kept = {name: value for name, value in variables.items() if not name.startswith(_CLAIMS)}
    return kept | {name: value for name, value in os.environ.items() if name.startswith(_CLAIMS)}
