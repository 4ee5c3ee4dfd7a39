# before: graph = insight.graph
import torch

import telegrad
import telegrad.autograd as autograd
import telegrad.rpc as rpc

workers = telegrad.local(["w1", "w2"], driver="w0")
images = torch.randn(2, 8)
scale = torch.ones(4, requires_grad=True)
encoder, decoder = torch.randn(8, 4, requires_grad=True), torch.randn(4, 8, requires_grad=True)


def encode(values):
    return (values @ encoder).tanh()


def decode(code, scale):
    return (code * scale) @ decoder
