package cgroup

import "strings"

// job reads the cgroups of batch systems. Below a user's slice anyone can make
// such names, and inside a container they are not the host's.
func (w *walk) job(rest []string, previous string, i int) int {
	if w.closed {
		return 0
	}
	if n := w.flux(rest[0]); n > 0 {
		return n
	}
	if w.chain.Delegated {
		return 0
	}
	for _, rule := range []func(rest []string, previous string, i int) int{
		w.slurm, w.slurmV1, w.pbs, w.htcondor, w.nomad, w.ecs, w.oarAndLSF,
	} {
		if n := rule(rest, previous, i); n > 0 {
			return n
		}
	}
	return 0
}

// enterJob adds a job. What units are named below it is the job's own.
func (w *walk) enterJob(system, id, step string) {
	w.chain.Levels = append(w.chain.Levels, Level{Kind: LevelJob, System: system, ID: id, Step: step})
	w.unitDone = true
}

// slurm reads cgroup v2: [NODE_]slurmstepd.scope/job_N/step_S/{user,slurm}.
// The slice above is the site's choice. Since Slurm 26.05 the job directory
// is the SLUID by default, which does not hold the job's number.
func (w *walk) slurm(rest []string, _ string, _ int) int {
	if rest[0] != "slurmstepd.scope" && !strings.HasSuffix(rest[0], "_slurmstepd.scope") {
		return 0
	}
	w.unit(rest[0])
	w.unitDone = true
	if len(rest) < 2 {
		return 1
	}
	id, ok := strings.CutPrefix(rest[1], "job_")
	switch {
	case ok && digits(id):
	case sluid(rest[1]):
		id = "sluid:" + rest[1]
	default:
		return 1
	}
	return 2 + w.slurmStep(id, rest[2:])
}

// slurmV1 reads /slurm[_NODE]/uid_U/job_N/step_S.
func (w *walk) slurmV1(rest []string, _ string, i int) int {
	if i != 0 || len(rest) < 3 || rest[0] != "slurm" && !strings.HasPrefix(rest[0], "slurm_") {
		return 0
	}
	number, ok := strings.CutPrefix(rest[1], "uid_")
	if !ok {
		return 0
	}
	uid, ok := parseUID(number)
	if !ok {
		return 0
	}
	id, ok := strings.CutPrefix(rest[2], "job_")
	if !ok || !digits(id) {
		return 0
	}
	w.chain.UID, w.chain.HasUID = uid, true
	return 3 + w.slurmStep(id, rest[3:])
}

func (w *walk) slurmStep(id string, rest []string) int {
	step, used := "", 0
	if len(rest) > 0 {
		if name, ok := strings.CutPrefix(rest[0], "step_"); ok {
			step, used = name, 1
		}
	}
	w.enterJob("slurm", id, step)
	if used == 1 && len(rest) > 1 && rest[1] == "slurm" {
		w.chain.Monitor = true
		used++
	}
	return used
}

// sluid reports "s" and 13 digits of Crockford's base 32.
func sluid(s string) bool {
	if len(s) != 14 || s[0] != 's' {
		return false
	}
	for i := 1; i < len(s); i++ {
		if !strings.ContainsRune("0123456789ABCDEFGHJKMNPQRSTVWXYZ", rune(s[i])) {
			return false
		}
	}
	return true
}

func (w *walk) pbs(rest []string, _ string, i int) int {
	if i != 0 || len(rest) < 3 || rest[0] != "pbs_jobs.service" && rest[0] != "pbspro.service" {
		return 0
	}
	if rest[1] != "jobid" && rest[1] != "jobs" {
		return 0
	}
	if rest[2][0] < '0' || rest[2][0] > '9' {
		return 0
	}
	w.unit(rest[0])
	w.enterJob("pbs", rest[2], "")
	return 3
}

// htcondor reads the slot; the path does not hold the job's number. On v2 the
// starter makes <name>.slice/<name>.scope below condor.service.
func (w *walk) htcondor(rest []string, previous string, _ int) int {
	if previous != "htcondor" && previous != "condor.service" && previous != "htcondor.slice" {
		return 0
	}
	name, ok := strings.CutPrefix(rest[0], "condor_")
	if !ok {
		return 0
	}
	name, slice := strings.CutSuffix(name, ".slice")
	name = strings.TrimSuffix(name, ".scope")
	i := strings.LastIndex(name, "_slot")
	if at := strings.IndexByte(name, '@'); at >= 0 {
		i = strings.LastIndex(name[:at], "_slot") // a host's name may hold _slot too
	}
	if i < 0 || i+5 >= len(name) || name[i+5] < '0' || name[i+5] > '9' {
		return 0
	}
	w.enterJob("htcondor", name[i+1:], "")
	if slice && len(rest) > 1 && strings.HasSuffix(rest[1], ".scope") {
		return 2
	}
	return 1
}

// flux runs each job's shell as a unit of the flux user's own manager, so the
// slice names the launcher and not the job's owner.
func (w *walk) flux(segment string) int {
	name, ok := between(segment, "imp-shell-", ".service")
	if !ok {
		return 0
	}
	rank, id, ok := strings.Cut(name, "-")
	if !ok || !digits(rank) || !containerdName(id) {
		return 0
	}
	w.unit(segment)
	w.enterJob("flux", id, "")
	return 1
}

// nomad reads ALLOCATION.TASK.scope below the slice of the agent's choice.
func (w *walk) nomad(rest []string, previous string, _ int) int {
	if !strings.HasSuffix(previous, ".slice") && previous != "share" && previous != "nomad" {
		return 0
	}
	name, scope := strings.CutSuffix(rest[0], ".scope")
	if len(name) < 38 || !uuid(name[:36], "-") || name[36] != '.' || !scope && previous == "" {
		return 0
	}
	if scope {
		w.unit(rest[0])
	}
	w.enterJob("nomad", name[:36], name[37:])
	return 1
}

// ecs reads Amazon's tasks, which hold Docker containers, or containers of
// their own naming on Fargate.
func (w *walk) ecs(rest []string, _ string, i int) int {
	if i != 0 || len(rest) < 2 {
		return 0
	}
	switch rest[0] {
	case "ecstasks.slice":
		task, ok := between(rest[1], "ecstasks-", ".slice")
		if !ok || !hexOnly(task) {
			return 0
		}
		done := w.unitDone
		w.enterJob("ecs", task, "")
		w.unitDone = done // the container's scope is systemd's own
		return 2
	case "ecs":
		used := 1
		if len(rest) > 2 && !ecsTaskID(rest[1]) && ecsTaskID(rest[2]) {
			used = 2 // /ecs/CLUSTER/TASK
		}
		task := rest[used]
		if !ecsTaskID(task) {
			return 0
		}
		w.enterJob("ecs", task, "")
		used++
		if len(rest) > used {
			if number, ok := strings.CutPrefix(rest[used], task+"-"); ok && digits(number) {
				w.enter(Level{Kind: LevelContainer, System: "ecs", ID: rest[used]})
				used++
			}
		}
		return used
	}
	return 0
}

func ecsTaskID(s string) bool { return len(s) == 32 && hexOnly(s) || uuid(s, "-") }

// ecsTask reports being directly in an ECS task, whose bare ids are Docker's.
func (w *walk) ecsTask() bool {
	last := len(w.chain.Levels) - 1
	return last >= 0 && w.chain.Levels[last].System == "ecs" && w.chain.Levels[last].Kind == LevelJob
}

func (w *walk) oarAndLSF(rest []string, _ string, i int) int {
	if i != 0 || len(rest) < 2 {
		return 0
	}
	switch rest[0] {
	case "oar": // /oar/USER_JOB
		if j := strings.LastIndexByte(rest[1], '_'); j > 0 && digits(rest[1][j+1:]) {
			w.enterJob("oar", rest[1][j+1:], "")
			return 2
		}
	case "torque":
		if rest[1][0] >= '0' && rest[1][0] <= '9' {
			w.enterJob("pbs", rest[1], "")
			return 2
		}
	case "lsf": // /lsf/CLUSTER/job.NUMBER.…
		if len(rest) < 3 {
			return 0
		}
		parts := strings.Split(rest[2], ".")
		if len(parts) > 1 && parts[0] == "job" && digits(parts[1]) {
			w.enterJob("lsf", parts[1], "")
			return 3
		}
	}
	return 0
}
