"""Segments, gather, normalisation and merge: what every library adapter shares."""

from dash_portable.segments.call import Addressing, Call, Library
from dash_portable.segments.gather import Room, gather_one_segment, gather_segments
from dash_portable.segments.given import attend_given
from dash_portable.segments.merge import merge_segments, normalise
from dash_portable.segments.places import cache_pages, page_size, page_table
from dash_portable.segments.rows import Spans, slot_count, spans
from dash_portable.segments.ways import InPlace, OneSegment, Segments, Way

__all__ = [
    "Addressing",
    "Call",
    "InPlace",
    "Library",
    "OneSegment",
    "Room",
    "Segments",
    "Spans",
    "Way",
    "attend_given",
    "cache_pages",
    "gather_one_segment",
    "gather_segments",
    "merge_segments",
    "normalise",
    "page_size",
    "page_table",
    "slot_count",
    "spans",
]
