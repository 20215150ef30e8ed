"""The plan of a job: arguments → job → command. Pure."""
