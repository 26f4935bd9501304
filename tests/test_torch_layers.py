"""torch's own transformer layers, whose inference path computes the norms past their modules."""

import copy

import pytest
import torch
from torch import nn

import tapernorm as tn
from tapernorm.modules import taper_norms
from tapernorm.sites import find_sites
from zoo import D, X, randomise, relative

CONFIG = tn.TaperConfig(arm="all", anchor_weight=0)
IMAGES = X.double()


class Encoder(nn.Module):
    def __init__(self, activation="relu", batch_first=True, bias=True):
        super().__init__()
        torch.manual_seed(0)
        options = {"norm_first": True, "batch_first": batch_first, "activation": activation, "bias": bias}
        layer = nn.TransformerEncoderLayer(D, 2, D, 0.1, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(D), enable_nested_tensor=False)
        self.head = nn.Linear(D, D)

    def forward(self, x):
        return self.head(self.encoder(x))


def built(**options):
    return randomise(Encoder(**options)).double().eval()


def at_zero(model):
    tn.taper_(model, CONFIG, example=IMAGES)
    randomise(model)
    for module in taper_norms(model).values():
        module.set_gate(0.0)
    return model


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_an_encoder_folds(activation, batch_first):
    model = built(activation=activation, batch_first=batch_first)
    sites = {site.name: site for site in find_sites(model, IMAGES)}
    assert len(sites) == 5 and not any(site.reason for site in sites.values())
    assert sites["encoder.layers.0.norm1"].consumers == ("encoder.layers.0.self_attn.in_proj_weight",)
    at_zero(model)
    with torch.no_grad():
        wanted = model(IMAGES)
        tn.fold_(model, example=IMAGES)
        found = model(IMAGES)  # where the inference path would be taken
    assert relative(found, wanted) < 1e-12
    assert relative(model(IMAGES), wanted) < 1e-12  # and where it would not


def test_the_inference_path_does_not_bypass_a_taper():
    stock = built()
    model = copy.deepcopy(stock)
    tn.taper_(model, CONFIG, example=IMAGES)
    assert torch.equal(model(IMAGES), stock(IMAGES))  # gradients on: torch takes the modules' path for both
    with torch.no_grad():
        assert relative(model(IMAGES), stock(IMAGES)) < 1e-12
        reference = model(IMAGES)
        for name, module in taper_norms(model).items():
            module.set_gate(0.0)
            assert relative(model(IMAGES), reference) > 1e-3, name
            module.set_gate(1.0)


def test_one_norm_of_two():
    model = built()
    tn.taper_(model, tn.TaperConfig(arm="all", anchor_weight=0, keep=("*norm2", "encoder.norm")), example=IMAGES)
    randomise(model)
    for module in taper_norms(model).values():
        module.set_gate(0.0)
    with torch.no_grad():
        wanted = model(IMAGES)
        tn.fold_(model, example=IMAGES)
        assert relative(model(IMAGES), wanted) < 1e-12
    assert isinstance(model.encoder.layers[0].norm2, nn.LayerNorm)


def test_attention_without_biases_takes_none_up():
    sites = {site.name: site.reason for site in find_sites(built(bias=False), IMAGES)}
    assert not any(sites.values())  # its norms have none either
    model = built(bias=False)
    for layer in model.encoder.layers:
        layer.norm1 = nn.LayerNorm(D).double()
    reasons = {site.name: site.reason for site in find_sites(model, IMAGES)}
    assert "has none that could take it up" in reasons["encoder.layers.0.norm1"]


def test_post_norm_layers_are_refused():
    layer = nn.TransformerEncoderLayer(D, 2, D, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(D, D)).eval()
    with pytest.raises(ValueError, match="none of the model's"):
        tn.taper_(model, example=X)


def test_a_decoder_says_what_is_in_the_way():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerDecoderLayer(D, 2, D, batch_first=True, norm_first=True)

        def forward(self, x):
            return self.layer(x, x.flip(1)).tanh()

    sites = {site.name: site for site in find_sites(Decoder().eval(), X)}
    assert sites["layer.norm1"].removable and sites["layer.norm3"].removable
    assert "are not all read from it by one weight" in sites["layer.norm2"].reason
