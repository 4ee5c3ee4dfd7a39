"""A web server that serves models on other workers, with batching. Run it in this directory:

    telegrad run server.toml

    curl localhost:8080/predict -d '[0.1, 0.2, 0.3, 0.4]'    # a prediction, batched with other requests
    curl -N 'localhost:8080/generate?length=100'             # a stream of letters
    curl localhost:8080/health                               # the models that respond, with process ids

If the process of a model is killed, requests to it get status 503 until it has restarted. If a client disconnects, the
model stops working on its request. After Ctrl-C, the server finishes running requests before it exits.
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
LIMIT = 5.0  # seconds for a prediction, or for the next letter of a stream
LETTERS = "abcdefghijklmnopqrstuvwxyz "

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# Functions of the workers with models


@rpc.functions.batch(max_size=32, max_wait=0.005)
async def predict(inputs: list[list[float]]) -> list[list[float]]:
    with torch.inference_mode():
        return model()(torch.tensor(inputs)).tolist()  # type: ignore[no-any-return]


async def generate(length: int) -> AsyncIterator[str]:
    """Yield the letters of a text."""
    generator = torch.Generator().manual_seed(0)
    for written in range(length):
        await asyncio.sleep(0.02)  # stands for a slow model
        try:
            yield LETTERS[int(torch.randint(len(LETTERS), (), generator=generator))]
        except GeneratorExit:
            print(f"nobody reads on: given up after {written} of {length} letters", flush=True)
            raise


@functools.cache
def model() -> nn.Module:
    """Return the model of this process. Replace this with code that loads your model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, OUTPUTS), nn.Softmax(dim=-1))


# Functions of the web server


turns = itertools.count()


def chosen() -> str:
    """Return the name of a worker with a model: the current workers in turn."""
    names = rpc.group("model").names
    return names[next(turns) % len(names)]


@web.middleware
async def as_http(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert errors of remote calls into HTTP responses."""
    try:
        return await handler(request)
    except CallTimeout as error:
        raise web.HTTPGatewayTimeout(text=str(error)) from error
    except (PeerError, UnknownWorker) as error:  # the worker was lost, or no worker has a model
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
    with letters, contextlib.suppress(ConnectionResetError):  # the client disconnected
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


# Common code


def main() -> None:
    if os.environ["TELEGRAD_ROLE"] == "model":
        model()  # load it before other workers can call
        rpc.init_rpc()
        rpc.serve()
    else:
        rpc.init_rpc()
        web.run_app(
            app(),
            host="127.0.0.1",
            port=int(os.environ.get("PORT", "8080")),
            handler_cancellation=True,  # cancel a request and its call if the client disconnects
            shutdown_timeout=5.0,  # for running requests; shorter than the `grace` of `telegrad run`
        )
        rpc.shutdown()


if __name__ == "__main__":
    main()
