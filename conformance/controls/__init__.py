"""Deliberately wrong engines that the checks must catch; a check that lets one pass is broken."""
