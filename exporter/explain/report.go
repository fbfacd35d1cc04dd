package explain

import (
	"maps"
	"slices"
	"strings"
	"time"

	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/holders"
	"gpuledger/exporter/owner"
)

// Version is the version of the JSON form of Report. Fields are added without
// raising it.
const Version = 1

// Report is how the owner of one process is found. Uids that are not known are
// null. There is no command line in it, and of the environment only the names
// of the variables that were looked for and are there.
type Report struct {
	Version         int       `json:"version"`
	ResolverVersion int       `json:"resolver_version"`
	BootID          string    `json:"boot_id"`
	PID             uint32    `json:"pid"`
	StartTicks      uint64    `json:"start_ticks"`
	StartedAt       time.Time `json:"started_at"`
	Zombie          bool      `json:"zombie"`
	Answer          Answer    `json:"answer"`
	Evidence        Evidence  `json:"evidence"`
	Steps           []Step    `json:"steps"`
	// Unseen says what could not be looked at, why, and what would show it.
	Unseen []string `json:"unseen"`
}

// Answer is whose the process is.
type Answer struct {
	User         string `json:"user"`
	UID          *int64 `json:"uid"`
	Kind         string `json:"kind"`
	Workload     string `json:"workload"`
	Project      string `json:"project"`
	Class        string `json:"class"`
	AttributedBy string `json:"attributed_by"`
	Confidence   string `json:"confidence"`
	Rule         string `json:"rule"` // name of the site rule
	Key          string `json:"key"`  // of the label, annotation or variable
	System       bool   `json:"system"`
	Review       bool   `json:"review"`
	Disagrees    bool   `json:"disagrees"`
	Pending      bool   `json:"pending"` // something is still being looked up
}

// Evidence is what the answer goes by.
type Evidence struct {
	Command       string          `json:"command"`
	Executable    string          `json:"executable"`
	ExecutableUID *int64          `json:"executable_uid"`
	ProcessUID    *int64          `json:"process_uid"`
	EffectiveUID  *int64          `json:"effective_uid"`
	LoginUID      *int64          `json:"login_uid"`
	SliceUID      *int64          `json:"slice_uid"`
	Unit          string          `json:"unit"`
	SystemSlice   bool            `json:"system_slice"`
	HostProcess   bool            `json:"host_process"`
	MPSServer     bool            `json:"mps_server"` // that root's daemon started
	Chain         []string        `json:"chain"`
	Cgroup        cgroup.Identity `json:"cgroup"`
	EngineOfRoot  bool            `json:"engine_of_root"`
	// UserNamespace says that the process has one of its own, NamespaceRootUID
	// which uid of the host is that namespace's uid 0.
	UserNamespace    bool   `json:"user_namespace"`
	NamespaceRootUID *int64 `json:"namespace_root_uid"`
	// Variables are those that were looked for and are there; null if they may
	// not be read.
	Variables []string   `json:"variables"`
	Job       *Job       `json:"job"`
	Pod       *Pod       `json:"pod"`
	Container *Container `json:"container"`
}

// Job is a batch job.
type Job struct {
	System    string `json:"system"`
	ID        string `json:"id"`
	Step      string `json:"step"`
	UID       *int64 `json:"uid"`
	Account   string `json:"account"`
	Partition string `json:"partition"`
	QOS       string `json:"qos"`
}

// Pod is a Kubernetes pod, with the annotations and labels that are looked at.
type Pod struct {
	UID            string            `json:"uid"`
	Namespace      string            `json:"namespace"`
	Name           string            `json:"name"`
	Labels         map[string]string `json:"labels"`
	Annotations    map[string]string `json:"annotations"`
	PriorityClass  string            `json:"priority_class"`
	ServiceAccount string            `json:"service_account"`
}

// Container is what its engine says, with the labels that are looked at.
type Container struct {
	ID          string            `json:"id"`
	Name        string            `json:"name"`
	Image       string            `json:"image"`
	ImageKnown  bool              `json:"image_known"`
	User        string            `json:"user"`
	ImageUser   string            `json:"image_user"`
	Labels      map[string]string `json:"labels"`
	ImageLabels map[string]string `json:"image_labels"`
	Binds       []Bind            `json:"binds"`
}

// Bind is a path of the host that the container was given.
type Bind struct {
	Path     string `json:"path"`
	OwnerUID *int64 `json:"owner_uid"`
}

// Step is what one step says.
type Step struct {
	Step    string `json:"step"`
	On      bool   `json:"on"`
	Named   bool   `json:"named"`
	Decides bool   `json:"decides"`
	Waiting bool   `json:"waiting"`
	// User, UID and Confidence are whom it names; empty if nobody.
	User       string `json:"user"`
	UID        *int64 `json:"uid"`
	Confidence string `json:"confidence"`
	Why        string `json:"why"`
}

// report lays an explanation out. Of labels and annotations only those are
// told that the configuration looks at: others may hold anything.
func report(x holders.Explanation, config owner.Config) Report {
	e, a := x.Evidence, x.Verdict
	r := Report{
		Version: Version, ResolverVersion: owner.ResolverVersion, StartedAt: x.StartedAt.UTC(), Zombie: x.Zombie, Unseen: []string{},
		Answer: Answer{
			User: a.User, UID: known(a.UID), Kind: x.Attribution.Workload.Kind, Workload: x.Attribution.Workload.Name,
			Project: a.Project, Class: a.Class, AttributedBy: string(a.AttributedBy), Confidence: string(a.Confidence),
			Rule: a.Rule, Key: a.Key, System: a.System, Review: a.Review, Disagrees: a.Disagrees, Pending: x.Attribution.Pending,
		},
		Evidence: Evidence{
			Command: e.Command, Executable: e.Executable, ExecutableUID: known(e.ExecutableUID), ProcessUID: known(e.ProcessUID),
			EffectiveUID: known(e.EffectiveUID), LoginUID: known(e.LoginUID), SliceUID: known(e.SliceUID), Unit: e.Unit,
			SystemSlice: e.SystemSlice, HostProcess: e.HostProcess, MPSServer: e.SystemLaunched, Chain: append([]string{}, e.Chain...),
			Cgroup: x.Chain.Identity(), EngineOfRoot: e.EngineOfRoot,
		},
	}
	if e.UserNamespace != nil {
		r.Evidence.UserNamespace, r.Evidence.NamespaceRootUID = true, known(e.UserNamespace.RootUID)
	}
	if e.Environment != nil {
		r.Evidence.Variables = append([]string{}, slices.Sorted(maps.Keys(e.Environment))...)
	}
	if j := e.Job; j != nil {
		r.Evidence.Job = &Job{j.System, j.ID, j.Step, known(j.UID), j.Account, j.Partition, j.QOS}
	}
	keys := labelKeys(config)
	if p := e.Pod; p != nil {
		r.Evidence.Pod = &Pod{
			UID: p.UID, Namespace: p.Namespace, Name: p.Name, PriorityClass: p.PriorityClass, ServiceAccount: p.ServiceAccount,
			Labels: only(p.Labels, append(keys, config.PodOwnerLabels...)), Annotations: only(p.Annotations, config.PodOwnerAnnotations),
		}
	}
	if c := e.Container; c != nil {
		r.Evidence.Container = &Container{
			ID: c.ID, Name: c.Name, Image: c.Image, ImageKnown: c.ImageKnown, User: c.User, ImageUser: c.ImageUser,
			Labels: only(c.Labels, keys), ImageLabels: only(c.ImageLabels, keys), Binds: []Bind{},
		}
		for _, b := range c.Binds {
			r.Evidence.Container.Binds = append(r.Evidence.Container.Binds, Bind{b.Path, known(b.OwnerUID)})
		}
	}
	for _, v := range x.Verdicts {
		step := Step{Step: string(v.Step), On: !v.Off, Named: v.Named, Decides: v.Decides, Waiting: v.Waiting, Why: v.Why}
		if v.Named {
			step.User, step.UID, step.Confidence = v.Answer.User, known(v.Answer.UID), string(v.Answer.Confidence)
		}
		r.Steps = append(r.Steps, step)
	}
	return r
}

func known(uid int64) *int64 {
	if uid < 0 {
		return nil
	}
	return new(uid)
}

// labelKeys are the labels that the configuration looks at.
func labelKeys(config owner.Config) []string {
	keys := slices.Concat(config.OwnerLabels, config.HomePathLabels)
	for _, source := range slices.Concat(config.ProjectSources, config.ClassSources) {
		if key, ok := strings.CutPrefix(source, "label:"); ok {
			keys = append(keys, key)
		}
	}
	for _, rule := range config.Rules {
		keys = slices.AppendSeq(keys, maps.Keys(rule.Labels))
	}
	return keys
}

func only(all map[string]string, keys []string) map[string]string {
	some := map[string]string{}
	for _, key := range keys {
		if value, ok := all[key]; ok {
			some[key] = value
		}
	}
	return some
}
