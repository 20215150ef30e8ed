"""What a job does, as events: one narrow interface that the layers emit into and that listeners read."""
