"""Profile a chain of layers: measure, estimate or compile the time and memory of each layer.

All modules except the formulas (`planner.profile.formula`) need torch.
"""
