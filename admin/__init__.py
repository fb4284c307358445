"""The admin app: status, metrics, the model list, drain and restore, decisions, the dashboard."""
