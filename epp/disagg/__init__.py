"""Stages of one request on different workers: who prefills, who decodes, who encodes, who lends its cache.

`handler` is the profile handler, `deciders` the field's rules, `pairing` the search by time, `transfer` what sending KV
from one worker to another takes.
"""
