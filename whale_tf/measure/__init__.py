"""Measurements that planners and simulators use: profiles of scripts, and a calibration of the machine."""
