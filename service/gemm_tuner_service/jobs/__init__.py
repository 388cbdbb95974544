"""Jobs for callers: what is asked for, told and watched."""
