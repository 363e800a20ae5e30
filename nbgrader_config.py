"""nbgrader's folders: `solutions/` becomes `exercises/`; the other steps live in `grading/`, outside git."""

c = get_config()  # noqa: F821  (nbgrader hands it in)

c.CourseDirectory.course_id = "ring-to-ddp"
c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "exercises"
c.CourseDirectory.submitted_directory = "grading/submitted"
c.CourseDirectory.autograded_directory = "grading/autograded"
c.CourseDirectory.feedback_directory = "grading/feedback"
c.CourseDirectory.solution_directory = "grading/solution"
c.CourseDirectory.db_url = "sqlite:///grading/gradebook.db"

# What a learner finds in place of the solution.
c.ClearSolutions.code_stub = {"python": 'raise NotImplementedError("your code here")'}
# A submission that lost a graded cell gets it back.
c.OverwriteCells.add_missing_cells = True
