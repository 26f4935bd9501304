"""What `find_sites` says of a model, by the norms' names."""

from tapernorm.sites import find_sites


def by_name(model, example=None):
    return {site.name: site for site in find_sites(model, example)}


def refusals(model, example=None):
    return {name: site.reason for name, site in by_name(model, example).items() if not site.removable}
