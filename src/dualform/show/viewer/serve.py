"""Serve the viewer: bind, make a token, say where it is, run until it is stopped."""

import getpass
import os
import secrets
import socket
import sys
from typing import Any

from dualform.errors import QueryError
from dualform.opening import Train, make_executor
from dualform.recording.estimate import size_text
from dualform.show.tokenizers import load_tokenizer

LOCAL = ("127.0.0.1", "localhost")


def make_server(
    run: str | os.PathLike[str],
    *,
    model: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    budget: int = 512 << 20,
    token: str | None = None,
    accept_untrained: bool = False,
    train: Train | None = None,
    trust: bool = False,
    executor: str | None = None,
    tokenizer: str | None = None,
) -> tuple[Any, socket.socket, str]:
    """Return a uvicorn server, the socket that it will listen on, and the address with its token.

    The server's `opened` is the run behind it, to be closed when it has stopped.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise QueryError("The viewer needs starlette and uvicorn: pip install 'dualform[viewer]'.") from error
    from dualform.show.viewer.app import make_app
    from dualform.show.viewer.connections import BoundedProtocol
    from dualform.show.viewer.guard import Guard
    from dualform.show.viewer.opened import Opened

    if executor is not None:
        make_executor(executor)  # a name that is none is refused before anything is served
    pieces = None if tokenizer is None else load_tokenizer(tokenizer)
    token = token or secrets.token_urlsafe(24)
    listening = _listen(host, port)
    bound = listening.getsockname()[1]
    hosts = {*LOCAL, host, socket.gethostname()} if host not in LOCAL else set(LOCAL)
    opened = Opened(
        run,
        model=model,
        budget=budget,
        accept_untrained=accept_untrained,
        train=train,
        trust=trust,
        executor=executor,
        tokenizer=pieces,
    )
    page_token = secrets.token_urlsafe(24)
    app = make_app(opened, page_token=page_token)
    # A cookie does not know ports: each viewer has a name of its own.
    guarded = Guard(app, token=token, page_token=page_token, cookie=f"dualform-{bound}", hosts=hosts)
    config = uvicorn.Config(
        guarded,
        http=BoundedProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
    )
    shown = host if host in LOCAL else socket.gethostname()
    server = uvicorn.Server(config)
    server.opened = opened  # type: ignore[attr-defined]
    return server, listening, f"http://{shown}:{bound}/?token={token}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # The protocol by name: asyncio sends small answers at once (TCP_NODELAY) only where it is given.
        listening = socket.socket(family, kind, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        raise QueryError(f"The viewer cannot listen on {host} port {port}: {error}. Choose another --port.") from error
    return listening


def serve(
    run: str | os.PathLike[str],
    *,
    model: str | None,
    host: str,
    port: int,
    budget: int,
    expose: bool,
    accept_untrained: bool = False,
    train: Train | None = None,
    trust: bool = False,
    executor: str | None = None,
    tokenizer: str | None = None,
) -> None:
    """Serve the viewer of one run until it is interrupted."""
    if host not in LOCAL and not expose:
        raise QueryError(
            f"--host {host} lets other machines ask. Add --expose if you mean that, or use the ssh line that "
            "`dualform view` prints."
        )
    server, listening, address = make_server(
        run,
        model=model,
        host=host,
        port=port,
        budget=budget,
        accept_untrained=accept_untrained,
        train=train,
        trust=trust,
        executor=executor,
        tokenizer=tokenizer,
    )
    bound = listening.getsockname()[1]
    if host not in LOCAL:
        sys.stderr.write(
            f"WARNING: listening on {host}. Whoever has the address below can see this run and its training data, and "
            "the connection is not encrypted.\n"
        )
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
    sys.stderr.write(
        f"The viewer of {run} is at the address above, until Ctrl-C. Its token keeps others out.\n"
        f"From another machine: ssh -N -L {bound}:127.0.0.1:{bound} {getpass.getuser()}@{socket.gethostname()}  "
        "and open the address there.\n"
        f"Masks use at most {size_text(budget)} of memory (--memory-mb); the first time a run is viewed they are "
        "prepared in the background.\n"
    )
    try:
        server.run(sockets=[listening])
    finally:
        server.opened.close()
