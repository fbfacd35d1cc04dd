package report

import (
	"encoding/json"
	"fmt"
	"io"
	"time"

	"gpuledger/accounting/billing"
)

// The JSON form of a statement. Times and amounts that end in a unit (_us,
// _mj, _kib_seconds) are exact integers; hours, kWh, prices and money are
// strings of decimals, as the CSV prints them, so that no reader makes floats
// of them. Fields are only ever added.

type jsonStatement struct {
	Period        string           `json:"period"`
	PeriodStart   string           `json:"period_start"`
	PeriodEnd     string           `json:"period_end"`
	Timezone      string           `json:"timezone"`
	Status        string           `json:"status"`
	Mode          string           `json:"mode"`
	Currency      string           `json:"currency"`
	CapacityHours string           `json:"capacity_hours"`
	ListAmount    string           `json:"list_amount"`
	Amount        string           `json:"amount"`
	Capacity      []jsonCapacity   `json:"capacity"`
	Accounts      []jsonAccount    `json:"accounts"`
	Lines         []jsonLine       `json:"lines"`
	Unpriced      []jsonUnpriced   `json:"unpriced"`
	Overlaps      []jsonOverlap    `json:"overlaps"`
	Unassigned    []jsonUnassigned `json:"unassigned"`
}

type jsonCapacity struct {
	Node         string `json:"node"`
	Model        string `json:"gpu_model"`
	Cards        int    `json:"cards"`
	InServiceUS  int64  `json:"in_service_us"`
	UnobservedUS int64  `json:"unobserved_us"`
	OverlapUS    int64  `json:"overlap_us"`
	Hours        string `json:"capacity_hours"`
	Coverage     string `json:"coverage"`
}

type jsonAccount struct {
	Account    string `json:"account"`
	CostCentre string `json:"cost_centre"`
	GPUUS      int64  `json:"gpu_us"`
	ListAmount string `json:"list_amount"`
	Amount     string `json:"amount"`
}

type jsonLine struct {
	ID         string      `json:"line_id"`
	Type       string      `json:"line_type"`
	Account    string      `json:"account"`
	Project    string      `json:"project"`
	CostCentre string      `json:"cost_centre"`
	User       string      `json:"user"`
	Node       string      `json:"node"`
	Model      string      `json:"gpu_model"`
	Profile    string      `json:"mig_profile"`
	Item       string      `json:"item"`
	Class      string      `json:"class"`
	Coverage   string      `json:"coverage"`
	Hours      *jsonHours  `json:"hours,omitempty"`
	Charge     *jsonCharge `json:"charge,omitempty"`
}

// jsonHours leaves out what is not known; unobserved lines have gpu_us and
// gpu_hours only.
type jsonHours struct {
	GPUUS            int64   `json:"gpu_us"`
	GPUHours         string  `json:"gpu_hours"`
	ShareUS          *int64  `json:"share_us,omitempty"`
	HeldUS           *int64  `json:"held_us,omitempty"`
	HeldHours        *string `json:"held_hours,omitempty"`
	ReservedUS       *int64  `json:"reserved_us,omitempty"`
	ReservedHours    *string `json:"reserved_hours,omitempty"`
	ActiveKnownUS    *int64  `json:"active_known_us,omitempty"`
	ActiveUS         *int64  `json:"active_us,omitempty"`
	ActiveHours      *string `json:"active_hours,omitempty"`
	IdleUS           *int64  `json:"idle_us,omitempty"`
	IdleHours        *string `json:"idle_hours,omitempty"`
	MemoryKnownUS    *int64  `json:"memory_known_us,omitempty"`
	MemoryKiBSeconds *int64  `json:"memory_kib_seconds,omitempty"`
	MemoryGiBHours   *string `json:"memory_gib_hours,omitempty"`
	EnergyMJ         *int64  `json:"energy_mj,omitempty"`
	EnergyKWh        *string `json:"energy_kwh,omitempty"`
	Estimated        bool    `json:"estimated"`
}

type jsonCharge struct {
	QuantityUS int64  `json:"quantity_us"`
	Quantity   string `json:"quantity"`
	Unit       string `json:"unit"`
	UnitPrice  string `json:"unit_price"`
	ListAmount string `json:"list_amount"`
	Amount     string `json:"amount"`
}

type jsonUnpriced struct {
	Node     string `json:"node"`
	Model    string `json:"gpu_model"`
	Profile  string `json:"mig_profile"`
	FirstDay string `json:"first_day"`
	LastDay  string `json:"last_day"`
	GPUUS    int64  `json:"gpu_us"`
}

type jsonOverlap struct {
	Day         string `json:"day"`
	Node        string `json:"node"`
	Card        string `json:"card"`
	Model       string `json:"gpu_model"`
	InServiceUS int64  `json:"in_service_us"`
	MeteredUS   int64  `json:"metered_us"`
	DayUS       int64  `json:"day_us"`
}

type jsonUnassigned struct {
	User  string `json:"user"`
	GPUUS int64  `json:"gpu_us"`
}

// WriteJSON writes a statement as one indented JSON object.
func WriteJSON(w io.Writer, statement billing.Statement) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(jsonOf(&statement)); err != nil {
		return fmt.Errorf("write the JSON of %s: %w", statement.Period.Name, err)
	}
	return nil
}

func jsonOf(s *billing.Statement) jsonStatement {
	list, amount := s.Total()
	j := jsonStatement{
		Period:      s.Period.Name,
		PeriodStart: s.Period.Start.Format(time.RFC3339), PeriodEnd: s.Period.End.Format(time.RFC3339),
		Timezone: s.Period.Location.String(),
		Status:   s.Status, Mode: string(s.Mode), Currency: s.Currency.Code,
		CapacityHours: s.CapacityHours().String(),
		ListAmount:    list.Decimal(s.Currency), Amount: amount.Decimal(s.Currency),
		// Empty lists are [], never null.
		Capacity: []jsonCapacity{}, Accounts: []jsonAccount{}, Lines: []jsonLine{},
		Unpriced: []jsonUnpriced{}, Overlaps: []jsonOverlap{}, Unassigned: []jsonUnassigned{},
	}
	for _, c := range s.Capacity {
		j.Capacity = append(j.Capacity, jsonCapacity{
			Node: c.Node, Model: c.Model, Cards: c.Cards, InServiceUS: c.InServiceUS, UnobservedUS: c.UnobservedUS,
			OverlapUS: c.OverlapUS, Hours: c.Hours.String(), Coverage: c.Decimal(),
		})
	}
	for _, a := range s.Accounts {
		j.Accounts = append(j.Accounts, jsonAccount{
			Account: a.Account, CostCentre: a.CostCentre, GPUUS: a.GPUUS,
			ListAmount: a.ListAmount.Decimal(s.Currency), Amount: a.Amount.Decimal(s.Currency),
		})
	}
	for _, l := range s.Lines {
		line := jsonLine{
			ID: l.ID, Type: string(l.Type), Account: l.Account, Project: l.Project, CostCentre: l.CostCentre, User: l.User,
			Node: l.Node, Model: l.Model, Profile: l.Profile, Item: l.Item, Class: l.Class, Coverage: l.Coverage.Decimal(),
		}
		if l.Hours != nil {
			line.Hours = jsonHoursOf(l.Hours)
		}
		if c := l.Charge; c != nil {
			line.Charge = &jsonCharge{
				QuantityUS: c.QuantityUS, Quantity: c.Quantity.String(), Unit: c.Unit, UnitPrice: l.UnitPrice,
				ListAmount: c.ListAmount.Decimal(s.Currency), Amount: c.Amount.Decimal(s.Currency),
			}
		}
		j.Lines = append(j.Lines, line)
	}
	for _, u := range s.Unpriced {
		j.Unpriced = append(j.Unpriced, jsonUnpriced(u))
	}
	for _, o := range s.Overlaps {
		j.Overlaps = append(j.Overlaps, jsonOverlap(o))
	}
	for _, u := range s.Unassigned {
		j.Unassigned = append(j.Unassigned, jsonUnassigned(u))
	}
	return j
}

func jsonHoursOf(h *billing.Hours) *jsonHours {
	j := &jsonHours{GPUUS: h.GPUUS, GPUHours: h.GPUHours.String(), Estimated: h.Estimated}
	if !h.Metered {
		return j
	}
	j.ShareUS = &h.ShareUS
	j.HeldUS, j.HeldHours = &h.HeldUS, printed(h.HeldHours)
	j.ReservedUS, j.ReservedHours = &h.ReservedUS, printed(h.ReservedHours)
	j.EnergyMJ, j.EnergyKWh = &h.EnergyMJ, printed(h.EnergyKWh)
	j.ActiveKnownUS, j.MemoryKnownUS = &h.ActiveKnownUS, &h.MemoryKnownUS
	if h.ActivityKnown() {
		j.ActiveUS, j.ActiveHours = &h.ActiveUS, printed(h.ActiveHours)
		j.IdleUS, j.IdleHours = &h.IdleUS, printed(h.IdleHours)
	}
	if h.MemoryKnown() {
		j.MemoryKiBSeconds, j.MemoryGiBHours = &h.MemoryKiBSeconds, printed(h.MemoryGiBHours)
	}
	return j
}

func printed(figure billing.Micro) *string {
	text := figure.String()
	return &text
}
