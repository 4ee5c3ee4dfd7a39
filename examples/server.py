"""A web server that answers its requests by models on other workers, in batches. In this folder:

    telegrad run server.toml

    curl localhost:8080/predict -d '[0.1, 0.2, 0.3, 0.4]'    # what a model says, in one batch with others' requests
    curl -N 'localhost:8080/generate?length=100'             # letter by letter, as they are made
    curl localhost:8080/health                               # the models that answer, with their processes

Kill the process of a model: requests to it are answered with 503 until it is back. Break off a request: what a model
does for it ends. Ctrl-C: what is under way is answered first.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import torch
from aiohttp import web
from torch import nn

import telegrad.rpc as rpc
from telegrad.errors import CallTimeout, PeerError, UnknownWorker

INPUTS, OUTPUTS = 4, 3
LIMIT = 5.0  # seconds for a prediction, or for the next piece of a text
LETTERS = "abcdefghijklmnopqrstuvwxyz "

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# What runs at the models' workers


@rpc.functions.batch(max_size=32, max_wait=0.005)
async def predict(inputs: list[list[float]]) -> list[list[float]]:
    with torch.inference_mode():
        return model()(torch.tensor(inputs)).tolist()  # type: ignore[no-any-return]


async def generate(length: int) -> AsyncIterator[str]:
    """A text."""
    generator = torch.Generator().manual_seed(0)
    for written in range(length):
        await asyncio.sleep(0.02)  # a model that takes its time
        try:
            yield LETTERS[int(torch.randint(len(LETTERS), (), generator=generator))]
        except GeneratorExit:
            print(f"nobody reads on: given up after {written} of {length} letters", flush=True)
            raise


@functools.cache
def model() -> nn.Module:
    """That of this process; yours is loaded here."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, OUTPUTS), nn.Softmax(dim=-1))


# What runs at the web server


turns = itertools.count()


def chosen() -> str:
    """The name of a worker that has a model: each in turn, of those that are there now."""
    names = rpc.group("model").names
    return names[next(turns) % len(names)]


@web.middleware
async def as_http(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What went wrong with a call, in the words of HTTP."""
    try:
        return await handler(request)
    except CallTimeout as error:
        raise web.HTTPGatewayTimeout(text=str(error)) from error
    except (PeerError, UnknownWorker) as error:  # the worker has gone, or there is none
        raise web.HTTPServiceUnavailable(text=str(error), headers={"Retry-After": "1"}) from error


async def answer(request: web.Request) -> web.Response:
    try:
        inputs = [float(value) for value in json.loads(await request.text())]
    except (ValueError, TypeError) as error:
        raise web.HTTPBadRequest(text=f"a list of {INPUTS} numbers is needed: {error}") from error
    if len(inputs) != INPUTS:
        raise web.HTTPBadRequest(text=f"a list of {INPUTS} numbers is needed, not of {len(inputs)}")
    return web.json_response(await rpc.rpc_async(chosen(), predict, (inputs,), timeout=LIMIT))


async def write(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    length = int(request.query.get("length", "100"))
    letters = rpc.rpc_stream(chosen(), generate, (length,), timeout=LIMIT)
    with letters, contextlib.suppress(ConnectionResetError):  # the client has gone
        await response.prepare(request)
        async for letter in letters:
            await response.write(letter.encode())
    return response


async def health(request: web.Request) -> web.Response:
    answers = rpc.group("model").rpc_async(os.getpid, timeout=1)
    there = {name: pid async for name, pid in answers.as_completed() if isinstance(pid, int)}
    return web.json_response(there, status=200 if there else 503)


def app() -> web.Application:
    made = web.Application(middlewares=[as_http])
    made.add_routes([web.post("/predict", answer), web.get("/generate", write), web.get("/health", health)])
    return made


# Both


def main() -> None:
    if os.environ["TELEGRAD_ROLE"] == "model":
        model()  # before others can call
        rpc.init_rpc()
        rpc.serve()
    else:
        rpc.init_rpc()
        web.run_app(
            app(),
            host="127.0.0.1",
            port=int(os.environ.get("PORT", "8080")),
            handler_cancellation=True,  # a request whose client has gone is cancelled, and with it its call
            shutdown_timeout=5.0,  # for what is under way; within the `grace` of `telegrad run`
        )
        rpc.shutdown()


if __name__ == "__main__":
    main()
