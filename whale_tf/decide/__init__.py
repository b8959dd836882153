"""Step, cluster and configuration -> the Plan, and the ops that it runs."""
