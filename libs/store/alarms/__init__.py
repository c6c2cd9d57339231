"""Alarms of runs: judged by the rules of `leyden.libs.contracts.alarms` from stored rows, and stored themselves.

attempts, steps, trends, gradings ──findings──▶ judging ──raised, ended──▶ alarms ──▶ readers
"""
