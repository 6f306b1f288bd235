"""Adasum beside averaging: how fast a polynomial of two or three coefficients is found.

    collectivesrun -np 2 python examples/adasum/adasum_small_model.py

In each step each rank draws one point of its own and learns from it. Two gradients that point the same way are averaged
by Adasum too, but where they have little to do with each other it adds them, so that the same learning rate gets
further in the same number of steps (Maleki et al., "Scaling distributed training with adaptive summation",
arXiv:2006.02924).
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

import collectives.torch as hvd

# What is to be found: the coefficients, the constant first; the last one is known.
POLYNOMIALS = {"square": (50.0, -20.0, 1.0), "cubic": (-5.0, -20.0, 5.0, 10.0)}
OPERATIONS = {"Average": hvd.Average, "Adasum": hvd.Adasum}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Adasum on a small model", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--mode", choices=POLYNOMIALS, default="square", help="the polynomial's degree")
    parser.add_argument(
        "--op", choices=OPERATIONS, nargs="+", default=list(OPERATIONS), help="how gradients are combined"
    )
    parser.add_argument(
        "--learning-rate", "--learning_rate", type=float, default=0.1, help="the same for every operation"
    )
    parser.add_argument("--x-max", "--x_max", type=float, default=1.0, help="points are drawn from -x-max to x-max")
    parser.add_argument("--steps", type=int, default=50, help="steps to train")
    parser.add_argument("--seed", type=int, default=42, help="random seed")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    return parser.parse_args()


def polynomial(x: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    powers = torch.arange(len(coefficients), device=x.device)
    return (x[:, None] ** powers) @ coefficients


def losses(name: str, args: argparse.Namespace, device: torch.device) -> list[float]:
    """Train with one operation; returns the mean squared error over the whole interval, before the first step and after
    each."""
    truth = torch.tensor(POLYNOMIALS[args.mode], device=device)
    found = torch.ones(len(truth) - 1, device=device, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([found], lr=args.learning_rate), named_parameters=[("coefficients", found)], op=OPERATIONS[name]
    )
    everywhere = torch.linspace(-args.x_max, args.x_max, 101, device=device)
    draw = torch.Generator().manual_seed(args.seed + hvd.rank())  # the same points for every operation

    def error(x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(polynomial(x, torch.cat([found, truth[-1:]])), polynomial(x, truth))

    history = [error(everywhere).item()]
    for _ in range(args.steps):
        x = (2 * torch.rand(1, generator=draw) - 1) * args.x_max
        optimizer.zero_grad()
        error(x.to(device)).backward()
        optimizer.step()
        history.append(error(everywhere).item())
    hvd.check_consistency({"coefficients": found})
    return history


def main() -> None:
    args = arguments()
    hvd.init()
    torch.set_num_threads(1)
    cuda = not args.no_cuda and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

    columns = [losses(name, args, torch.device("cuda" if cuda else "cpu")) for name in args.op]
    if hvd.rank() == 0:
        print(f"Mean squared error on {hvd.size()} ranks, learning rate {args.learning_rate}")
        print(" ".join(["  step", *(f"{name:>12}" for name in args.op)]))
        for step in range(0, args.steps + 1, max(1, args.steps // 10)):
            print(" ".join([f"{step:>6}", *(f"{column[step]:>12.6g}" for column in columns)]))
        print(
            "; ".join(
                f"{name}: loss after {args.steps} steps {column[-1]:.6g}"
                for name, column in zip(args.op, columns, strict=True)
            )
        )
        print("All ranks hold the same parameters", flush=True)


if __name__ == "__main__":
    main()
