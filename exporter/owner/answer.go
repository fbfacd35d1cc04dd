package owner

import "slices"

// ResolverVersion is the version of the rules by which users are found. It is
// raised when the same evidence and configuration may name somebody else.
const ResolverVersion = 2

// Confidence is how good an answer is.
type Confidence string

// Levels of confidence.
const (
	ConfidenceHigh   Confidence = "high"   // the kernel, systemd, a scheduler or the site says so
	ConfidenceMedium Confidence = "medium" // self-declared, or by strong implication
	ConfidenceLow    Confidence = "low"    // a name that happens to fit
	ConfidenceNone   Confidence = ""       // nobody could be named
)

// Step is one way to find the user. It is what attributed_by says.
type Step string

// Steps, in the order of DefaultSteps. Values are on the wire: never change
// one.
const (
	// StepRule is a site rule that is not marked last.
	StepRule Step = "rule"
	// StepScheduler is the owner of a batch job.
	StepScheduler Step = "scheduler"
	// StepKubernetes is what the site says of a pod's namespace, or what the
	// pod's annotations and labels say.
	StepKubernetes Step = "kubernetes"
	// StepUserSlice is the host user's slice. It also covers sudo: a process of
	// uid 0 in a user's session is that user's.
	StepUserSlice Step = "user_slice"
	// StepLabel is a container label that names a known human account and does
	// not come with the image.
	StepLabel Step = "label"
	// StepUIDMap is the person as whom uid 0 of the process's user namespace
	// counts on the host, or to whom /etc/subuid lends that number.
	StepUIDMap Step = "uid_map"
	// StepProcessUID is the uid of a host process other than root, and of a
	// container's process only where a number was explicitly given for it.
	StepProcessUID Step = "process_uid"
	// StepLoginUID is the login session's uid, for host processes that run as
	// root outside any user's slice, and for containers without a daemon.
	StepLoginUID Step = "login_uid"
	// StepHomePath is whose home a container's project or files lie in.
	StepHomePath Step = "home_path"
	// StepNamePrefix is the account that a container is called after.
	StepNamePrefix Step = "name_prefix"
	// StepEnvironment is the account that a variable of the process names.
	StepEnvironment Step = "environment"
	// StepRuleLast is a site rule that is marked last.
	StepRuleLast Step = "rule_last"
	// StepSystem marks processes of the system itself. It cannot be ordered.
	StepSystem Step = "system"
	// StepNone marks what no step could attribute.
	StepNone Step = "none"
)

// DefaultSteps is the order that is used unless the site gives its own: what
// the kernel, systemd or a scheduler says comes before what people say, and
// that before what only looks as if.
var DefaultSteps = []Step{
	StepRule, StepScheduler, StepKubernetes, StepUserSlice, StepLabel, StepUIDMap, StepProcessUID, StepLoginUID,
	StepHomePath, StepNamePrefix, StepEnvironment, StepRuleLast,
}

// DefaultTrustedSteps are the steps whose answers are good enough for a bill
// unless the site gives its own: all of high and medium confidence.
var DefaultTrustedSteps = slices.DeleteFunc(slices.Clone(DefaultSteps), func(step Step) bool {
	return step == StepNamePrefix || step == StepEnvironment
})

// Answer is who the user is, and why.
type Answer struct {
	User         string // account name, uid:N, or "unattributed"
	UID          int64  // -1 where no uid stands behind User
	AttributedBy Step
	Confidence   Confidence
	Rule         string // name of the site rule, for the rule steps
	// Key is that of the label, annotation or variable that named the user, for
	// steps that go by one.
	Key     string
	Project string
	Class   string
	// System says that the process is the system's own: shown, never billed.
	System bool
	// Review says that the step is not one that the site trusts for billing.
	Review bool
	// Disagrees says that a later step of high confidence names someone else.
	Disagrees bool
	// Waiting says that an account's name is still being looked up, or cannot
	// be at the moment: the answer is the best so far.
	Waiting bool
}

// Verdict is what one step says of a process.
type Verdict struct {
	Step Step
	// Off says that the site does not use the step: what it would say counts
	// for nothing.
	Off bool
	// Named says that the step names somebody: Answer. Decides says that this
	// is the answer.
	Named, Decides bool
	Answer         Answer
	// Waiting says that the step cannot tell yet.
	Waiting bool
	// Why is what the step goes by, or why it passes.
	Why string
}
