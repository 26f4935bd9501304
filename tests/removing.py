"""What the tests of removal without training share."""

import torch

import tapernorm as tn
from tapernorm.search import Search
from zoo import D, randomise

IDS = torch.randint(D, (12, 16), generator=torch.Generator().manual_seed(3))


def model_of(row, dtype=torch.float64):
    """A tiny model whose norms matter: the text is far from uniform, and gains and biases are random."""
    return randomise(row.build()).to(dtype)


def search_on(model, refit=True):
    """A search over the internal norms of a model."""
    sites = [site for site in tn.find_sites(model) if site.role == "internal"]
    return Search(model, sites, IDS[4:], IDS[:4], refit, None)
